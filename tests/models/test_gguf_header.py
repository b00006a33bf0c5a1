"""The header of a GGUF file against the reader of the package `gguf`, and files that are cut short or altered."""

import contextlib

import gguf
import pytest
import torch

from tests.models.test_twins import TOYS
from toolkit.errors import UserError
from toolkit.interchange.gguf import write_gguf
from toolkit.models import shapes
from toolkit.models.gguf_header import read_header
from toolkit.models.gguf_shape import gguf_shape
from toolkit.models.gguf_tensors import dequantised
from toolkit.models.shape_of import shape_of
from toolkit.models.twins import twin_model


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(monkeypatch, tmp_path):
    for name, layers in TOYS.items():
        monkeypatch.setitem(shapes.SHAPES, name, layers)
    model = twin_model("toy-llama", 2, torch.float16, 0.5)
    write_gguf(model, tmp_path / "toy.gguf", "Q8_0")
    return tmp_path / "toy.gguf", model


def test_tensors_and_scalars_are_those_of_the_other_reader(file):
    path, model = file
    header, reader = read_header(path), gguf.GGUFReader(path)
    for tensor, (name, found) in zip(reader.tensors, header.tensors.items(), strict=True):
        expected = (tensor.name, tuple(tensor.shape[::-1]), tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert (name, found.shape, found.kind, found.offset, found.nbytes) == expected
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert values.pop("tokenizer.ggml.tokens")
    assert header.metadata == values
    assert gguf_shape(header) == shape_of(model)


def test_mixture_by_hand(tmp_path):
    """Two blocks, the first one dense; 4 experts of 32 neurons, and a shared one of twice the width."""
    writer = gguf.GGUFWriter(tmp_path / "moe.gguf", "qwen2moe")
    for add, value in (
        (writer.add_block_count, 2),
        (writer.add_head_count, 4),
        (writer.add_expert_used_count, 2),
    ):
        add(value)
    sizes = {"token_embd": (100, 64), "output": (100, 64), "blk.0.ffn_gate_inp_shexp": (1, 64)}
    for block in range(2):
        sizes |= {f"blk.{block}.attn_{name}": (64, 64) for name in ("q", "output")}
        sizes |= {f"blk.{block}.attn_{name}": (32, 64) for name in ("k", "v")}
    sizes |= {"blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96)}
    sizes |= {"blk.1.ffn_gate_exps": (4, 32, 64), "blk.1.ffn_up_exps": (4, 32, 64), "blk.1.ffn_down_exps": (4, 64, 32)}
    sizes |= {"blk.1.ffn_gate_inp": (4, 64), "blk.1.ffn_gate_shexp": (64, 64), "blk.1.ffn_up_shexp": (64, 64)}
    sizes |= {"blk.1.ffn_down_shexp": (64, 64)}
    for name, shape in sizes.items():
        writer.add_tensor(f"{name}.weight", torch.zeros(shape).numpy())
    finish(writer)
    shape = gguf_shape(read_header(tmp_path / "moe.gguf"))
    assert (shape.layers, shape.dense_layers, shape.dense_ffn, shape.ffn) == (2, 1, 96, 32)
    assert (shape.experts, shape.experts_per_token, shape.shared_experts) == (4, 2, 2)
    assert (shape.heads, shape.tied) == (4, False)
    assert shape.parameters == {
        "embedding": 6400,
        "head": 6400,
        "attention": 2 * (2 * 64 * 64 + 2 * 32 * 64),
        "ffn": 3 * 64 * 96,
        "experts": (4 + 2) * 3 * 64 * 32,
        "router": 4 * 64,
        "other": 64,  # the shared expert's gate
    }


CUT = {0: "is empty", 3: "letters GGUF", 200: "cut short", -1: "its tensors"}


def test_a_file_cut_short_is_refused(file):
    path, _ = file
    whole = path.read_bytes()
    for kept, words in CUT.items():
        path.write_bytes(whole[:kept])
        with pytest.raises(UserError, match=rf"toy\.gguf: cannot be read as a GGUF file: [^\n]*{words}[^\n]*$"):
            read_header(path)


@pytest.fixture
def pieces(tmp_path):
    """The headers of one file and of its pieces, two tensors each; the first piece has the embedding alone."""
    for name, most in (("whole.gguf", 0), ("split.gguf", 2)):
        writer = gguf.GGUFWriter(tmp_path / name, "llama", split_max_tensors=most)
        writer.add_block_count(1)
        writer.add_embedding_length(64)
        for tensor, value in (("token_embd", 1), ("blk.0.ffn_up", 2), ("blk.0.ffn_down", 3), ("output_norm", 4)):
            writer.add_tensor(f"{tensor}.weight", torch.full((96, 64), float(value)).numpy())
        finish(writer)
    return read_header(tmp_path / "whole.gguf"), sorted(tmp_path.glob("split*"))


def test_pieces_are_one_model_whichever_is_named(pieces):
    whole, files = pieces
    assert len(files) == 2
    for file in files:
        header = read_header(file)
        assert (header.file, header.files) == (files[0], files)
        assert {name: tensor.shape for name, tensor in header.tensors.items()} == {
            name: tensor.shape for name, tensor in whole.tensors.items()
        }
        assert header.metadata["llama.block_count"] == 1
        assert [float(dequantised(header.tensors[name]).mean()) for name in whole.tensors] == [1, 2, 3, 4]


def test_a_piece_that_is_missing_renamed_or_of_another_file_is_one_line(pieces):
    _, (first, second) = pieces
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(UserError, match=r"1 of them, such as split-00002-of-00002\.gguf, are not beside it$"):
        read_header(first)
    second.write_bytes(content)
    first.rename(first.with_name("model.gguf"))
    with pytest.raises(UserError, match="its name does not say which"):
        read_header(first.with_name("model.gguf"))


def test_altered_bytes_of_a_header_never_break_the_reader(file):
    """Bytes of the header in turn: it is read, or refused as bad input."""
    path, _ = file
    whole = path.read_bytes()
    places, read = range(0, 2000, 13), 0
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(UserError):
            gguf_shape(read_header(path))
            read += 1
    assert 20 < read < len(places) - 20
