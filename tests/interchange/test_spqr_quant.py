"""Checkpoints of spqr_quant: the layout against a hand-worked tile and the oracle, and what is damaged is refused."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests import naive_spqr as naive
from toolkit.errors import UserError
from toolkit.formats import QUANTISED, FormatError
from toolkit.interchange import load_dense_model, open_checkpoint, open_spqr_quant, save_spqr_quant
from toolkit.interchange.spqr_quant import PARTS, from_tensors, to_tensors
from toolkit.kernels import csr, spqr
from toolkit.quantization import spqr as quantiser

LAYER = "model.layers.0.mlp.up_proj"


def quantised(shape, form="spqr", outliers=0.1, reorder=False):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * 0.02
    packed = QUANTISED[form].from_quantised(quantiser.SpQR(outliers).round(weight), torch.float16)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(0)).int()
    return dataclasses.replace(packed, permutation=order) if reorder else packed


def same(found, packed):
    assert type(found) is type(packed)
    assert found.shape == packed.shape
    assert found.tensors.keys() == packed.tensors.keys()
    return all(torch.equal(found.tensors[name], tensor) for name, tensor in packed.tensors.items())


@pytest.mark.parametrize("form", QUANTISED)
def test_every_bit_comes_back(form):
    for shape, outliers in itertools.product([(32, 48), (48, 7), (16, 0)], (0, 0.1)):
        for reorder in {False, shape[1] > 0 and shape[1] % 2 == 0}:
            packed = quantised(shape, form, outliers, reorder)
            assert same(from_tensors(to_tensors(packed), shape), packed)


@pytest.mark.parametrize("form", QUANTISED)
def test_tensors_are_those_of_the_oracle(form):
    packed = quantised((32, 40), form, reorder=True)
    parts = to_tensors(packed)
    assert [parts[name].ndim for name in PARTS] == [1, 1, 1, 1]
    assert [str(parts[name].dtype) for name in PARTS] == ["torch.int64", *["torch.int32"] * 3]
    codes = spqr.unpack(packed.words, packed.shape)
    given = (codes.weights, codes.scales, codes.zeros, codes.second_order)
    assert parts["dense_weights"].numpy().view(np.uint64).tolist() == naive.pack(*(part.tolist() for part in given))
    entries = list(zip(*(part.tolist() for part in packed.outliers.entries()), strict=True))
    offsets, words = (naive.csr if form == "spqr" else naive.ptcsr)(entries, 32)
    assert (parts["row_offsets"].tolist(), parts["col_vals"].tolist()) == (offsets, words)
    assert parts["in_perm"].numpy().view(np.uint16).tolist() == packed.permutation.tolist()


def test_hand_worked_tile():
    """Row 2: scale code 6, zero code 2, weights 3, 7 and 5 in columns 0, 1 and 15; 1.5 (0x3E00) added in column 4."""
    words = [byte << 54 for byte in (0, 0, 0x3C, 0x3C, 0, 0, 0x40, 0x40, 0, 0, 0x38, 0x38, 0, 0, 0xBC, 0xBC)]
    words[2] |= 6 | 2 << 3 | 3 << 6 | 7 << 9 | 5 << 51
    parts = {
        "dense_weights": torch.tensor(words),
        "row_offsets": torch.tensor([0, 0, 0, *[1] * 14], dtype=torch.int32),
        "col_vals": torch.tensor([0x3E00 << 16 | 4], dtype=torch.int32),
        "in_perm": torch.tensor(
            [0 | 1 << 16, 2 | 4 << 16, 3 | 5 << 16, *(2 * k | (2 * k + 1) << 16 for k in range(3, 8))]
        ),
    }
    parts["in_perm"] = parts["in_perm"].int()
    found = from_tensors(parts, (16, 16))
    assert found.permutation.tolist() == [0, 1, 2, 4, 3, *range(5, 16)]
    scale, zero = 1 * (6 - 0.5), 2 * (2 + 1)
    row = found.decode()[2].tolist()
    assert [row[c] for c in (0, 1, 15, 2)] == [scale * (q - zero) for q in (3, 7, 5, 0)]
    assert row[3] == scale * -zero + 1.5, "column 4 of the words is column 3 of the weight"
    assert same(from_tensors(to_tensors(found), (16, 16)), found)


def test_no_outliers_may_be_of_any_type():
    parts = to_tensors(quantised((16, 16), outliers=0))
    assert same(from_tensors(parts | {"col_vals": torch.zeros(0)}, (16, 16)), quantised((16, 16), outliers=0))
    assert from_tensors({name: parts[name] for name in PARTS[:3]}, (16, 16)).permutation is None


def test_what_the_layout_cannot_hold_is_refused(tmp_path):
    packed, wrong = quantised((16, 16)), []
    for shape, told in (
        ((16, 32_769), "32769 columns; spqr_quant reads at most 32768"),
        ((16, 15), "15 columns in another order"),
    ):
        words, outliers = torch.zeros(*spqr.tiles(shape), 16, dtype=torch.int64), csr.no_outliers(shape)
        order = torch.arange(shape[1], dtype=torch.int32)
        matrix = QUANTISED["spqr"](shape, torch.float16, words, outliers.offsets, outliers.col_vals, order)
        wrong.append(([("a.weight", matrix)], f"a.weight: {told}"))
    wrong += [
        ([("a.weight", packed), ("a.bias", torch.zeros(16))], "a.bias: spqr_quant has no biases"),
        ([("a.weight", packed), ("a.weight", packed)], "two tensors are named 'a.col_vals'"),
    ]
    for weights, told in wrong:
        with pytest.raises(UserError, match=told):
            save_spqr_quant(tmp_path / "made", weights, {})
    assert not (tmp_path / "made").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model with quantised matrices, dense; the matrices; and its checkpoint."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 24}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, dtype=torch.float16)
    model = LlamaForCausalLM(config).half().eval()
    packed = {}
    with torch.no_grad():
        for number, (name, module) in enumerate(model.model.layers.named_modules()):
            if isinstance(module, torch.nn.Linear):
                matrix = quantised(tuple(module.weight.shape), list(QUANTISED)[number % 2], reorder=number % 3 == 0)
                packed[f"model.layers.{name}.weight"] = matrix
                module.weight.copy_(matrix.decode())
    folder = tmp_path_factory.mktemp("spqr_quant") / "model"
    weights = [(name, packed.get(name, tensor)) for name, tensor in model.state_dict().items()]
    save_spqr_quant(folder, weights, json.loads(config.to_json_string()), shard_bytes=4000)
    return model, packed, folder


def test_a_whole_model(whole):
    model, packed, folder = whole
    assert len(list(folder.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.packed_names) == sorted(packed)
    assert all(same(checkpoint.packed(name), matrix) for name, matrix in packed.items())
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == checkpoint.shapes()
    read = load_dense_model(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    tokens = torch.tensor([[1, 5, 9]])
    assert torch.equal(read(tokens).logits, model(tokens).logits)


def test_the_configuration_tells_what_transformers_asks_for(whole):
    from transformers import SpQRConfig

    _, packed, folder = whole
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = SpQRConfig(**{key: value for key, value in entry.items() if key != "quant_method"})
    matrix, module = packed[f"{LAYER}.weight"], LAYER
    sizes = (matrix.words.numel(), matrix.offsets.numel(), matrix.col_vals.numel())
    assert tuple(config.shapes[f"{module}.{part}.shape"] for part in PARTS[:3]) == sizes
    assert config.shapes[f"{module}.in_perm.shape"] in (0, 16)
    assert len(config.shapes) == 4 * len(packed)
    assert "lm_head.weight" in config.modules_to_not_convert


@pytest.fixture
def single(tmp_path):
    save_spqr_quant(tmp_path / "made", [("a.weight", quantised((32, 48), reorder=True))], {})
    return tmp_path / "made"


def reopened(folder):
    return open_spqr_quant(folder, {"a.weight": (32, 48)}).packed("a.weight")


def test_damaged_tensors_and_files_are_refused(single):
    path = single / "model.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    for part, spoil, told in (
        ("dense_weights", lambda t: t[:-16].clone(), "80 words; expected 96 for 32 × 48"),
        ("col_vals", lambda t: t.index_fill(0, torch.tensor([0]), 0x3C000030), "an outlier lies outside"),
        ("in_perm", lambda t: t[1:].clone(), "in_perm is"),
    ):
        save_file(tensors | {f"a.{part}": spoil(tensors[f"a.{part}"])}, path)
        with pytest.raises(FormatError, match=f"model.safetensors: inconsistent weight 'a.weight': .*{told}"):
            reopened(single)
    save_file({name: tensor for name, tensor in tensors.items() if name != "a.col_vals"}, path)
    with pytest.raises(FormatError, match=r"model\.safetensors: weight 'a.weight' lacks its tensor 'a.col_vals'"):
        reopened(single)
    path.write_bytes(whole)
    with pytest.raises(FormatError, match=r"'a\.weight' is no matrix of the model"):
        open_spqr_quant(single, {})
    path.rename(single / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"pytorch_model\.bin: pickled, .*safetensors\.torch\.save_file\("):
        reopened(single)


def test_other_layouts_are_refused(single):
    path = single / "config.json"
    entry = json.loads(path.read_text())["quantization_config"]
    path.write_text(json.dumps({"quantization_config": entry | {"bits": 4}}))
    with pytest.raises(FormatError, match=r"config\.json: bits is 4"):
        reopened(single)
