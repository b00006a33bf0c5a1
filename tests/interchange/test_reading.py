"""What compressed-tensors wrote is read to the bit; what is damaged is refused, naming file and tensor."""

import contextlib
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import naive_sparse_bitmask as naive
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


def test_specials_are_in_the_checkpoint():
    dense = load_file(DATA / "llama.dense.safetensors")
    specials = dense["model.layers.1.mlp.down_proj.weight"][2, :4]
    assert naive.bits(specials) == [0x8000, 0x7F80, 0x7FC1, 0x0001]
    found = open_checkpoint(DATA / "llama").tensor("model.layers.1.mlp.down_proj.weight")
    assert naive.bits(found[2, :4]) == [0, 0x7F80, 0x7FC1, 0x0001]


def test_packed_weights_by_name():
    checkpoint = open_checkpoint(DATA / "llama")
    assert len(checkpoint.packed_names) == 13
    for name in checkpoint.packed_names:
        packed = checkpoint.packed(name)
        packed.check()
        assert same_bits(packed.decode(), checkpoint.tensor(name))


def test_what_was_read_does_not_change_with_the_file(types):
    checkpoint = open_checkpoint(types)
    packed, dense = checkpoint.packed("float16.weight"), checkpoint.tensor("norm.bias")
    before = naive.bits(packed.decode()), naive.bits(dense)
    path = types / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size // 2))
    assert (naive.bits(packed.decode()), naive.bits(dense)) == before


@pytest.mark.parametrize(
    ("name", "told"),
    [("nothing.weight", "does not exist"), (f"{UP}.bitmap", "does not exist"), ("lm_head.weight", "is not packed")],
)
def test_names_that_are_not_packed(name, told):
    with pytest.raises(UserError, match=told):
        open_checkpoint(DATA / "llama").packed(name)


def test_float8_has_no_endor():
    checkpoint = open_checkpoint(DATA / "types")
    with pytest.raises(UserError, match="float8_e4m3fn"):
        checkpoint.packed("float8_e4m3fn.weight")


def test_an_older_entry_and_a_single_file_before_an_index(types, change):
    change(types / "config.json", lambda config: {"compression_config": config["quantization_config"]})
    (types / "model.safetensors.index.json").write_text("not read")
    assert "norm.weight" in open_checkpoint(types).packed_names


@contextlib.contextmanager
def refused(*told):
    with pytest.raises(FormatError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for part in told:
        assert str(part) in message


def altered(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


CONFIGS = [
    (lambda c: c.pop("quantization_config") and c, "has no sparsity_config"),
    (lambda c: c["quantization_config"].pop("sparsity_config") and c, "has no sparsity_config"),
    (lambda c: c["quantization_config"].update(sparsity_config={}), "has no sparsity_config"),
    (lambda c: c.update(quantization_config="packed"), "has no sparsity_config"),
    (lambda c: c["quantization_config"]["sparsity_config"].update(format="sparse-24-bitmask"), "'sparse-24-bitmask'"),
    (lambda c: [c], "holds no JSON object"),
]


@pytest.mark.parametrize(("edit", "told"), CONFIGS)
def test_other_configs(types, change, edit, told):
    change(types / "config.json", edit)
    with refused(types / "config.json", told):
        open_checkpoint(types)


def test_missing_and_broken_files(types, tmp_path):
    with refused(tmp_path / "nowhere" / "config.json", "cannot be read"):
        open_checkpoint(tmp_path / "nowhere")
    path = types / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with refused(path, "cannot be read"):
            open_checkpoint(types)
    path.unlink()
    with refused(types, "holds neither model.safetensors nor model.safetensors.index.json"):
        open_checkpoint(types)
    (types / "config.json").write_text("{")
    with refused(types / "config.json", "cannot be read"):
        open_checkpoint(types)


BITMASK = f"{UP}.bitmask"
# changes to weight_map; those that are not strings, too
INDICES = [
    ({BITMASK: "model-9.safetensors"}, "names 'model-9.safetensors', which does not exist"),
    ({BITMASK: "../llama/config.json"}, "expected the name of a file beside it"),
    ({BITMASK: ".."}, "which does not exist"),
    ({BITMASK: None}, "is None; expected the name of a file"),
    ({BITMASK: "config.json"}, "config.json cannot be read"),
    ({"more.weight": "model-00001-of-00003.safetensors"}, "lacks tensor 'more.weight'"),
    ({"more.shape": "model-00001-of-00003.safetensors"}, "lacks tensor 'more.shape'"),
]


@pytest.mark.parametrize(("added", "told"), INDICES)
def test_indices_that_do_not_fit(llama, change, added, told):
    change(llama / "model.safetensors.index.json", lambda index: index["weight_map"].update(added))
    with refused(llama, told):
        open_checkpoint(llama)


@pytest.mark.parametrize("part", ["shape", "compressed", "bitmask", "row_offsets"])
def test_a_packed_weight_needs_all_four(llama, change, part):
    change(llama / "model.safetensors.index.json", lambda index: index["weight_map"].pop(f"{UP}.{part}") and index)
    with refused(llama, f"weight '{UP}.weight' lacks its tensor '{UP}.{part}'"):
        open_checkpoint(llama)


def test_an_index_without_a_map(llama, change):
    change(llama / "model.safetensors.index.json", lambda index: {"metadata": index["metadata"]})
    with refused(llama / "model.safetensors.index.json", "has no weight_map"):
        open_checkpoint(llama)


def test_a_shard_that_is_gone_and_one_that_is_another(llama):
    shard = llama / "model-00002-of-00003.safetensors"
    shard.replace(llama / "kept")
    with refused(llama / "model.safetensors.index.json", f"names '{shard.name}', which does not exist"):
        open_checkpoint(llama)
    (llama / "model-00001-of-00003.safetensors").replace(shard)
    (llama / "kept").replace(llama / "model-00001-of-00003.safetensors")
    with refused("lacks tensor"):
        open_checkpoint(llama)


DAMAGES = {
    "fewer values": ("compressed", lambda t: t[:-1]),
    "more values": ("compressed", lambda t: torch.cat([t, t[:1]])),
    "another type": ("compressed", lambda t: t.double()),
    "a bit more": ("bitmask", lambda t: t.index_fill(0, torch.tensor(4), 1)),
    "a bit beyond": ("bitmask", lambda t: t | torch.tensor([0, 0x80], dtype=torch.uint8)),
    "fewer rows": ("bitmask", lambda t: t[1:]),
    "words": ("bitmask", lambda t: t.to(torch.int32)),
    "offsets of another": ("row_offsets", lambda t: t + 1),
    "offsets in disorder": ("row_offsets", lambda t: t.flip(0)),
    "one offset too many": ("row_offsets", lambda t: torch.cat([t, t[-1:]])),
    "narrow offsets": ("row_offsets", lambda t: t.int()),
    "another shape": ("shape", lambda t: t + 1),
    "a shape beyond memory": ("shape", lambda t: t * 2**40),
    "a shape of negatives": ("shape", lambda t: -t),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_do_not_agree(types, damage):
    part, edit = DAMAGES[damage]
    path = types / "model.safetensors"
    altered(path, lambda tensors: tensors.update({f"float16.{part}": edit(tensors[f"float16.{part}"]).contiguous()}))
    checkpoint = open_checkpoint(types)
    with refused(path, "'float16.weight'"):
        checkpoint.tensor("float16.weight")
    assert checkpoint.tensor("norm.weight").shape == (10,)


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


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000; the weights beside it are"),
        ({"vocab_size": 10**9}, "mismatched tensor"),
        ({"intermediate_size": 10**9}, "mismatched tensor"),
        ({"hidden_size": "many"}, "transformers cannot use it"),
    ],
)
def test_a_configuration_of_another_model_is_refused_before_a_model_is_made(llama, change, entries, told):
    change(llama / "config.json", lambda config: config | entries)
    with pytest.raises(UserError, match=told):
        load_dense_model(llama)


def test_files_of_the_wrong_kind(llama, change):
    change(llama / "model.safetensors.index.json", lambda found: {"weight_map": {"a": 5}})
    with refused("weight_map/a is 5; expected the name of a file"):
        open_checkpoint(llama)
    for text in ("[" * 5000, '{"weight_map": [1]}', "[]", '{"\\ud800": 1}'):
        (llama / "model.safetensors.index.json").write_text(text)
        with refused("index.json"):
            open_checkpoint(llama)
    os.mkfifo(llama / "model.safetensors")
    with refused("model.safetensors", "not a regular file"):
        open_checkpoint(llama)
