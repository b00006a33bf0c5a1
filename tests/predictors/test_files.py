"""Files of predictors: given back as they were, refused where they are inconsistent or another model's."""

import logging

import pytest
import torch

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.predictors import PREDICTORS, STORED, load_predictors, save_predictors
from toolkit.predictors.files import FILE


@pytest.fixture
def kept(setting, predictors_of):
    """Predictors of one kind and the samples: `kept(kind)`."""

    def make(kind):
        model, limits, samples = setting()
        return predictors_of(kind, model, limits, samples), samples

    return make


@pytest.mark.parametrize("kind", STORED)
def test_a_file_gives_predictors_back(kept, kind, tmp_path):
    predictors, samples = kept(kind)
    save_predictors(tmp_path / "file", "tiny", predictors)
    found = load_predictors(tmp_path / "file", "tiny")
    for layer, (one, other) in enumerate(zip(found, predictors, strict=True)):
        assert (type(one), one.limit, one.nbytes) == (type(other), other.limit, other.nbytes)
        assert torch.equal(one.scores(samples.inputs[layer]), other.scores(samples.inputs[layer]))


def test_a_layer_without_predictor_loads_all_and_says_so(kept, tmp_path, caplog):
    predictors, _ = kept("low_rank")
    save_predictors(tmp_path / "file", "tiny", [None, *predictors[1:]])
    with caplog.at_level(logging.WARNING):
        found = load_predictors(tmp_path / "file", "tiny")
    assert found[0] is None
    assert "no predictor for layers [0] of tiny: they load every neuron" in caplog.text


def test_another_models_predictors_are_refused(kept, tmp_path):
    save_predictors(tmp_path / "file", "tiny", kept("low_rank")[0])
    with pytest.raises(UserError, match="predictors of model 'tiny'; expected 'opt': make a file for this model"):
        load_predictors(tmp_path / "file", "opt")


def test_inconsistent_files_are_refused(kept, tmp_path):
    cases = {
        "low_rank": [
            ({"layers": '[{"kind": "magic", "limit": 0}]'}, {}, "unknown predictor 'magic'"),
            ({"layers": '[{"kind": "low_rank", "limit": null}]'}, {}, "limit: None: Input should"),
            ({}, {"0.outward": torch.zeros(48, 5)}, "inconsistent predictors"),
        ],
        "gate": [({}, {"0.scale": torch.ones(47)}, "inconsistent predictors")],
        "few_bits": [
            ({}, {"0.codes": torch.zeros(7, dtype=torch.uint8)}, "inconsistent predictors"),
            ({}, {"0.scales": torch.zeros(3, 96, 2).bfloat16()}, "inconsistent predictors"),
        ],
    }
    for kind, crafted in cases.items():
        save_predictors(tmp_path / "file", "tiny", kept(kind)[0])
        about, tensors = tensor_files.load(tmp_path / "file", FILE)
        for other, wrong, words in crafted:
            tensor_files.save(tmp_path / "crafted", FILE, about | other, tensors | wrong)
            with pytest.raises(UserError, match=words) as caught:
                load_predictors(tmp_path / "crafted", "tiny")
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", sorted(PREDICTORS.keys() - STORED))
def test_a_kind_that_no_file_can_keep_is_refused(kept, kind, tmp_path):
    with pytest.raises(UserError, match=f"layer 0: predictor '{kind}' is not kept in files"):
        save_predictors(tmp_path / "file", "tiny", kept(kind)[0])
