"""Files of compressed-tensors are read to the bit; damaged ones are refused, naming file and tensor."""

import os
import shutil
from functools import partial

import pytest
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests import naive_sparse_bitmask as naive
from tests import refusals
from tests.interchange.conftest import DATA
from toolkit.errors import UserError
from toolkit.formats import FormatError
from toolkit.formats.sparse_bitmask import SparseBitmask
from toolkit.interchange import load_dense_model, open_checkpoint

UP = "model.layers.0.mlp.up_proj"


def same_bits(tensor, other):
    whole = tensor.dtype == other.dtype and tensor.shape == other.shape
    return whole and naive.bits(tensor.contiguous()) == naive.bits(other.contiguous())


def expected(name, weight, checkpoint):
    """The weight that was packed, with +0.0 for −0.0 if it was packed."""
    if name not in checkpoint.packed_names:
        return weight
    rows = naive.dense_bits(weight if weight.ndim == 2 else weight[None])
    return torch.tensor(rows).to(naive.UNSIGNED[weight.itemsize]).view(weight.dtype).view(weight.shape)


def test_every_tensor_of_the_judge_s_checkpoints_to_the_bit(judged):
    folder, dense = judged
    checkpoint = open_checkpoint(folder)
    found = dict(checkpoint.tensors())
    assert found.keys() == dense.keys() == set(checkpoint.names)
    for name, weight in dense.items():
        assert same_bits(found[name], expected(name, weight, checkpoint)), name


def test_what_the_judge_packs_is_what_we_pack(judged):
    folder, dense = judged
    checkpoint = open_checkpoint(folder)
    assert checkpoint.packed_names
    for name in checkpoint.packed_names:
        for part, tensor in SparseBitmask.encode(dense[name]).tensors.items():
            stored = f"{name.removesuffix('.weight')}.{part}"
            theirs = load_file(checkpoint.stored[stored])[stored]
            assert theirs.dtype == tensor.dtype, stored
            assert theirs.shape == tensor.shape, stored
            assert theirs.view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist(), stored


def test_what_was_read_does_not_change_with_the_file(types):
    checkpoint = open_checkpoint(types)
    packed, dense = checkpoint.packed("float16.weight"), checkpoint.tensor("norm.bias")
    before = naive.bits(packed.decode()), naive.bits(dense)
    path = types / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size // 2))
    assert (naive.bits(packed.decode()), naive.bits(dense)) == before


def test_names_that_are_not_packed():
    for folder, name, told in (
        ("llama", "nothing.weight", "does not exist"),
        ("llama", "lm_head.weight", "is not packed"),
        ("types", "float8_e4m3fn.weight", "float8_e4m3fn"),  # which Endor's format cannot hold
    ):
        with pytest.raises(UserError, match=told):
            open_checkpoint(DATA / folder).packed(name)


def test_an_older_entry_and_a_single_file_before_an_index(types, change):
    change(types / "config.json", lambda config: {"compression_config": config["quantization_config"]})
    (types / "model.safetensors.index.json").write_text("not read")
    assert "norm.weight" in open_checkpoint(types).packed_names


refused = partial(refusals.refused, kind=FormatError)


def test_other_configs(types, change):
    path = types / "config.json"
    sound = path.read_text()
    for edit, told in (
        (lambda c: c["quantization_config"]["sparsity_config"].update(format="sparse-24"), "'sparse-24'"),
        (lambda c: [c], "holds no JSON object"),
    ):
        change(path, edit)
        with refused(path, told):
            open_checkpoint(types)
        path.write_text(sound)


def test_missing_files(types):
    """`tests/test_foreign_files.py` has damaged ones."""
    path = types / "model.safetensors"
    path.unlink()
    with refused(types, "holds neither model.safetensors nor model.safetensors.index.json"):
        open_checkpoint(types)
    os.mkfifo(path)
    with refused(path, "not a regular file"):
        open_checkpoint(types)


SHARD = "model-00001-of-00003.safetensors"


def test_indices_that_do_not_fit(llama, change):
    path = llama / "model.safetensors.index.json"
    sound = path.read_text()
    for added, told in (
        ({f"{UP}.bitmask": "../llama/config.json"}, "expected the name of a file beside it"),
        ({"more.weight": SHARD}, "lacks tensor 'more.weight'"),
    ):
        change(path, lambda index, added=added: index["weight_map"].update(added))
        with refused(llama, told):
            open_checkpoint(llama)
        path.write_text(sound)
    change(path, lambda index: index["weight_map"].pop(f"{UP}.shape") and index)  # a packed weight needs all four
    with refused(llama, f"weight '{UP}.weight' lacks its tensor '{UP}.shape'"):
        open_checkpoint(llama)
    path.write_text(sound)
    shutil.copy(llama / "model-00002-of-00003.safetensors", llama / SHARD)
    with refused("lacks tensor"):
        open_checkpoint(llama)


def test_a_file_is_opened_no_oftener_for_more_tensors(llama, monkeypatch):
    """A header may name a hundred thousand tensors, and opening a file parses it."""
    opened = []
    monkeypatch.setattr(safetensors, "safe_open", lambda path, **kind: opened.append(path) or safe_open(path, **kind))
    checkpoint = open_checkpoint(llama)
    checkpoint.shapes()
    assert len(list(checkpoint.tensors())) > 20
    times = {path.name: opened.count(path) for path in opened}
    assert len(times) == 3
    assert max(times.values()) <= 4


def test_a_model_of_it(llama):
    model = load_dense_model(llama)
    dense = load_file(DATA / "llama.dense.safetensors")
    checkpoint = open_checkpoint(llama)
    found = model.state_dict()
    assert found.keys() == dense.keys()
    for name, weight in dense.items():
        assert same_bits(found[name], expected(name, weight, checkpoint)), name
    assert not model.training
    assert model.config.rope_parameters["rope_theta"] == 12345
    assert not hasattr(model.config, "quantization_config")


def test_a_model_needs_its_tensors_and_no_others(llama, change, tmp_path):
    index = llama / "model.safetensors.index.json"
    change(index, lambda i: i["weight_map"].pop("model.norm.weight") and i)
    with pytest.raises(FormatError, match=r"missing tensor model\.norm\.weight"):
        load_dense_model(llama)
    change(llama / "config.json", lambda c: c.update(num_hidden_layers=1))
    with pytest.raises(FormatError, match=r"tensor model\."):
        load_dense_model(llama)
    with pytest.raises(UserError, match="transformers cannot use it"):
        load_dense_model(DATA / "types")


@pytest.mark.parametrize("model_type", ["llama", "never-heard-of"])
def test_code_in_a_checkpoint_is_not_run(llama, change, model_type):
    (llama / "modeling.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    change(llama / "config.json", lambda config: config.update(auto_map=auto_map, model_type=model_type))
    if model_type == "llama":
        assert type(load_dense_model(llama)).__module__.startswith("transformers.")
    else:
        with pytest.raises(UserError, match="transformers cannot use it"):
            load_dense_model(llama)
    assert not list(llama.rglob("ran"))


def test_a_configuration_of_another_model_is_refused_before_a_model_is_made(llama, change):
    path = llama / "config.json"
    sound = path.read_text()
    for entries, told in (
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000; the weights beside it are"),
        ({"vocab_size": 10**9}, "mismatched tensor"),
    ):
        change(path, lambda config, entries=entries: config | entries)
        with pytest.raises(UserError, match=told):
            load_dense_model(llama)
        path.write_text(sound)
