"""A GGUF file in other types: keys and vectors as they were, matrices as the package `gguf` quantises them."""

import gguf
import numpy as np
import pytest
import torch

from tests.models.test_gguf_header import finish
from tests.models.test_twins import TOYS
from tests.studies.test_mixtures import quantize_chunk
from toolkit.errors import UserError
from toolkit.interchange.gguf import write_gguf
from toolkit.measure import llama_cpp_quantiser
from toolkit.models import shapes
from toolkit.models.gguf_header import read_header
from toolkit.models.twins import twin_model
from toolkit.papers.beyond.requantised import requantise


@pytest.fixture
def source(monkeypatch, tmp_path):
    monkeypatch.setitem(shapes.SHAPES, "toy-llama", TOYS["toy-llama"])
    monkeypatch.setattr(llama_cpp_quantiser, "_quantize_chunk", lambda: quantize_chunk)
    write_gguf(twin_model("toy-llama", 2), tmp_path / "source.gguf", "Q8_0")
    return tmp_path / "source.gguf"


def read(file):
    """Keys with their contents, and tensors as the package `gguf` reads them."""
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return keys, {tensor.name: tensor for tensor in reader.tensors}


def values(tensor):
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize(("mixture", "of_layers", "of_head"), [("F16", "F16", "F16"), ("Q4_0", "Q4_0", "Q8_0")])
def test_matrices_are_quantised_once_more_and_all_else_is_copied(source, tmp_path, mixture, of_layers, of_head):
    requantise(source, tmp_path / "target.gguf", mixture)
    (keys, before), (found_keys, found) = read(source), read(tmp_path / "target.gguf")
    assert found_keys == keys | {"general.file_type": gguf.LlamaFileType[f"MOSTLY_{mixture}"]}
    assert list(found) == list(before)
    assert read_header(tmp_path / "target.gguf").quantisation == mixture
    for name, tensor in found.items():
        first = values(before[name])
        assert tensor.shape.tolist() == before[name].shape.tolist()
        if name.endswith("norm.weight"):
            assert np.array_equal(tensor.data, before[name].data)
            continue
        kind = of_head if name == "output.weight" else of_layers
        assert tensor.tensor_type.name == kind
        expected = gguf.quants.quantize(first, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(tensor.data, expected), name


def test_the_pieces_of_a_split_file_become_one_file(source, tmp_path):
    keys, tensors = read(source)
    writer = gguf.GGUFWriter(tmp_path / "split.gguf", "llama", split_max_tensors=8)
    for name, field in gguf.GGUFReader(source).fields.items():
        if name in keys and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    pieces = sorted(tmp_path.glob("split*"))
    assert len(pieces) > 1
    requantise(pieces[-1], tmp_path / "joined.gguf", "Q4_0")
    requantise(source, tmp_path / "target.gguf", "Q4_0")
    (keys, expected), (found_keys, found) = read(tmp_path / "target.gguf"), read(tmp_path / "joined.gguf")
    assert found_keys == keys
    assert {name: tensor.data.tobytes() for name, tensor in found.items()} == {
        name: tensor.data.tobytes() for name, tensor in expected.items()
    }


def test_a_damaged_file_and_an_unknown_mixture_leave_nothing_behind(source, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(source.read_bytes()[:900])
    for file, mixture, word in ((damaged, "Q4_0", "damaged.gguf"), (source, "Q9", "unknown mixture of llama.cpp 'Q9'")):
        with pytest.raises(UserError, match=word):
            requantise(file, tmp_path / "target.gguf", mixture)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.gguf", "source.gguf"]


def test_a_tied_embedding_has_the_type_of_a_head(monkeypatch, tmp_path):
    monkeypatch.setattr(llama_cpp_quantiser, "_quantize_chunk", lambda: quantize_chunk)
    writer = gguf.GGUFWriter(tmp_path / "tied.gguf", "llama")
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_tensor("token_embd.weight", torch.randn(8, 64).numpy())
    writer.add_tensor("blk.0.ffn_gate_inp.weight", torch.randn(4, 64).numpy())
    writer.add_tensor("blk.0.ffn_up_exps.weight", torch.randn(4, 8, 64).numpy())
    finish(writer)
    requantise(tmp_path / "tied.gguf", tmp_path / "target.gguf", "Q3_K_S")
    kinds = {name: tensor.kind for name, tensor in read_header(tmp_path / "target.gguf").tensors.items()}
    assert list(kinds.values()) == ["Q8_0", "F32", "Q4_0"]  # no row is 256 long; routers stay
