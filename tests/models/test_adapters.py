"""Adapters in a file: merged as the products say, and refused where they do not belong."""
# ruff: noqa: F811

import json

import pytest
import torch

from tests.families import write_tokenizer
from tests.sparsity.conftest import _small, tiny, tokens  # noqa: F401
from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.models import load_model
from toolkit.models.adapters import (
    KIND,
    Adapters,
    LowRankDifference,
    as_stored,
    fingerprint,
    in_int8,
    load,
    merge,
    named_linears,
    save,
)
from toolkit.models.cutting import cut_for_good
from toolkit.sparsity import Magnitudes, thresholded, thresholds_of


def random_adapters(model, rank=2):
    lows = {}
    for name, linear in named_linears(model):
        rows, columns = linear.weight.shape
        lows[name] = LowRankDifference(torch.randn(rows, rank), torch.randn(rank, columns))
    return Adapters(as_stored(lows), torch.tensor([0.1, 0.0, 0.3]))


@pytest.fixture
def saved(tiny, tmp_path):
    """A dense model, adapters for it, and their file."""
    model = tiny("llama")
    adapters = random_adapters(model)
    save(tmp_path / "adapters", model, adapters, {"model": "tiny"})
    return model, adapters, tmp_path / "adapters"


@torch.no_grad()
def test_a_merged_model_adds_the_products_and_cuts(saved, tiny, tokens):
    model, adapters, file = saved
    merge(model, file)
    cut_for_good(model)
    expected = tiny("llama")
    for name, linear in named_linears(expected):
        low = adapters.differences[name]
        linear.weight += torch.einsum("ir,rj->ij", low.left, low.right)
    with thresholded(expected, adapters.thresholds):
        assert torch.allclose(model(tokens[None, :16]).logits, expected(tokens[None, :16]).logits, atol=1e-4)
    assert torch.equal(thresholds_of(model), adapters.thresholds)
    assert thresholds_of(expected) is None


def test_int8_by_hand():
    """A scale for each vector of the longer side: its largest magnitude over 127."""
    values, scales = in_int8(torch.tensor([[127.0, -63.4, 0.0], [2.54, 0.01, -1.27]]))
    assert values.tolist() == [[127, -63, 0], [127, 0, -64]]  # 63.5 to the even one
    torch.testing.assert_close(scales, torch.tensor([[1.0], [0.02]]))
    values, scales = in_int8(torch.tensor([[254.0, 1.0], [2.0, -0.5], [0.0, 0.25]])[None])
    assert (values.tolist(), scales.shape) == ([[[127, 127], [1, -64], [0, 32]]], (1, 1, 2))


def test_a_file_holds_a_byte_a_number_and_gives_the_differences_back(saved):
    model, adapters, file = saved
    found = load(file, model)
    for name, low in adapters.differences.items():
        for one, other in zip(low, found.differences[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    _, tensors = tensor_files.load(file, KIND)
    assert {tensors[f"{name}.{side}"].dtype for name in adapters.differences for side in ("left", "right")} == {
        torch.int8
    }


@torch.no_grad()
def test_another_model_and_a_damaged_file_change_nothing(saved, tiny):
    model, _, file = saved
    assert fingerprint(tiny("llama")) == fingerprint(tiny("llama").bfloat16())
    other = tiny("llama")
    other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    before = [value.clone() for value in other.parameters()]
    with pytest.raises(UserError, match=r"made for another model \(tiny\)"):
        merge(other, file)
    assert all(torch.equal(*pair) for pair in zip(before, other.parameters(), strict=True))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="damaged"):
        merge(model, file)
    assert thresholds_of(model) is None


@torch.no_grad()
def test_a_saved_sparse_model_cuts_when_it_is_loaded(saved, tokens, tmp_path):
    model, adapters, file = saved
    merge(model, file)
    cut_for_good(model)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    loaded, _ = load_model(str(tmp_path / "model"), torch.float32)
    assert torch.equal(loaded(tokens[None, :16]).logits, model(tokens[None, :16]).logits)
    assert torch.equal(thresholds_of(loaded), adapters.thresholds)
    with pytest.raises(UserError, match="made for another model"):
        merge(loaded, file)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"activation_thresholds": [0.1, 0.2, "a"]}))
    with pytest.raises(UserError, match="expected a list of 3 finite numbers"):
        load_model(str(tmp_path / "model"))


RELU = [("opt", {}), ("llama", {"hidden_act": "relu"})]  # FC1, FC2 with biases; gates


@pytest.mark.parametrize(("family", "options"), RELU)
@torch.no_grad()
def test_models_with_relu_have_thresholds_of_zero(tiny, tokens, tmp_path, family, options):
    """Zeros of a ReLU are not active: a threshold of 0 says so, changes nothing, and is fitted."""
    tiny(family, **options).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"activation_thresholds": [0, 0, 0]}))
    write_tokenizer(tmp_path)
    model, _ = load_model(str(tmp_path), torch.float32)
    assert thresholds_of(model).tolist() == [0, 0, 0]
    dense = tiny(family, **options)
    assert torch.equal(model(tokens[None, :16]).logits, dense(tokens[None, :16]).logits)
    assert Magnitudes.measure(model, tokens, sequence_length=16).thresholds(0.1).tolist() == [0, 0, 0]
