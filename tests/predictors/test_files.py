"""Files of predictors: given back as they were, refused where they are damaged, crafted or another model's."""

import logging

import pytest
import torch

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.predictors import PREDICTORS, STORED, Predictors
from toolkit.predictors.predictors import FILE


@pytest.fixture
def kept(setting, predictors_of):
    """Predictors of one kind: `kept(kind)`."""

    def make(kind):
        model, limits, samples = setting()
        return Predictors("tiny", tuple(predictors_of(kind, model, limits, samples))), samples

    return make


@pytest.mark.parametrize("kind", STORED)
def test_a_file_gives_predictors_back(kept, kind, tmp_path):
    predictors, samples = kept(kind)
    predictors.save(tmp_path / "file")
    found = Predictors.load(tmp_path / "file", "tiny")
    assert found.nbytes == predictors.nbytes
    for layer, (one, other) in enumerate(zip(found, predictors, strict=True)):
        assert (type(one), one.limit) == (type(other), other.limit)
        assert torch.equal(one.scores(samples.inputs[layer]), other.scores(samples.inputs[layer]))


def test_a_layer_without_predictor_loads_all_and_says_so(kept, tmp_path, caplog):
    predictors, _ = kept("low_rank")
    Predictors("tiny", (None, *predictors[1:])).save(tmp_path / "file")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = Predictors.load(tmp_path / "file", "tiny")
    assert found[0] is None
    assert "no predictor for layers [0] of tiny: they load every neuron" in caplog.text


def test_another_models_predictors_are_refused(kept, tmp_path):
    predictors, _ = kept("low_rank")
    predictors.save(tmp_path / "file")
    with pytest.raises(UserError, match="predictors of model 'tiny'; expected 'opt': make a file for this model"):
        Predictors.load(tmp_path / "file", "opt")


@pytest.mark.parametrize("fault", ["cut short", "one bit"])
def test_damaged_files_are_refused(kept, tmp_path, fault):
    predictors, _ = kept("low_rank")
    predictors.save(tmp_path / "file")
    content = bytearray((tmp_path / "file").read_bytes())
    if fault == "one bit":
        content[-5] ^= 1
    (tmp_path / "file").write_bytes(content if fault == "one bit" else content[:-7])
    with pytest.raises(UserError, match="damaged" if fault == "one bit" else "cannot be read"):
        Predictors.load(tmp_path / "file", "tiny")


@pytest.mark.parametrize(
    ("kind", "about", "tensors", "told"),
    [
        ("low_rank", {"version": "2"}, {}, "version '2'; this code reads 1"),
        ("low_rank", {"layers": "[{}]"}, {}, "record number 1: kind"),
        (
            "low_rank",
            {"layers": '[{"kind": "magic", "limit": 0}]'},
            {},
            "unknown predictor 'magic'",
        ),
        ("low_rank", {"layers": "[3]"}, {}, "3: Input should be a valid dict"),
        (
            "low_rank",
            {"layers": '[{"kind": "low_rank", "limit": "0"}]'},
            {},
            "limit: '0': Input should be",
        ),
        (
            "low_rank",
            {"layers": '[{"kind": "low_rank", "limit": null}]'},
            {},
            "limit: None: Input should",
        ),
        ("low_rank", {"layers": '[{"kind": "low_rank", "limit": [0]}]'}, {}, "should be a valid number"),
        ("low_rank", {"layers": "[" * 100_000}, {}, "nested more than 100 deep"),
        ("low_rank", {}, {"0.inward": torch.zeros(4, 32).half()}, "inconsistent predictors"),
        ("low_rank", {}, {"0.bias": torch.zeros(48).to(torch.float8_e4m3fn)}, "0.bias, float8_e4m3fn: expected real"),
        ("low_rank", {}, {"0.inward": torch.zeros(4)}, "inconsistent predictors"),
        ("low_rank", {}, {"0.outward": torch.zeros(48, 5)}, "outward of a predictor"),
        ("low_rank", {}, {"1.bias": torch.tensor([torch.nan] * 48)}, "1.bias, float32: expected real and finite"),
        ("gate", {}, {"0.scale": torch.ones(47)}, "weight of a predictor"),
        ("few_bits", {}, {"0.codes": torch.zeros(7, dtype=torch.uint8)}, "inconsistent predictors"),
        ("few_bits", {}, {"0.scales": torch.zeros(3, 96, 2).bfloat16()}, "inconsistent predictors"),
        ("few_bits", {}, {"0.bias": torch.zeros(48)}, "bias of a predictor"),
    ],
)
def test_crafted_files_are_refused(kept, tmp_path, kind, about, tensors, told):
    kept(kind)[0].save(tmp_path / "file")
    said, found = tensor_files.load(tmp_path / "file", FILE)
    tensor_files.save(tmp_path / "crafted", FILE, said | about, found | tensors)
    with pytest.raises(UserError, match=told) as caught:
        Predictors.load(tmp_path / "crafted", "tiny")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", sorted(PREDICTORS.keys() - STORED))
def test_what_no_file_can_keep_is_refused(kept, kind, tmp_path):
    with pytest.raises(UserError, match=f"layer 0: predictor '{kind}' is not kept in files"):
        kept(kind)[0].save(tmp_path / "file")
