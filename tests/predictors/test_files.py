"""Files of predictors: given back as they were, refused where they are inconsistent or another model's."""

import logging

import pytest
import torch

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.predictors import STORED, load_predictors, save_predictors
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


def test_files_of_another_model_and_inconsistent_ones_are_refused(kept, tmp_path):
    file = tmp_path / "file"
    for kind, tensor, wrong in (
        ("low_rank", "0.outward", torch.zeros(48, 5)),
        ("gate", "0.scale", torch.ones(47)),
        ("few_bits", "0.codes", torch.zeros(7, dtype=torch.uint8)),
    ):
        save_predictors(file, "tiny", kept(kind)[0])
        with pytest.raises(UserError, match="predictors of model 'tiny'; expected 'opt'"):
            load_predictors(file, "opt")
        about, tensors = tensor_files.load(file, FILE)
        tensor_files.save(file, FILE, about, tensors | {tensor: wrong})
        with pytest.raises(UserError, match="inconsistent predictors"):
            load_predictors(file, "tiny")
    with pytest.raises(UserError, match="predictor 'oracle' is not kept in files"):
        save_predictors(file, "tiny", kept("oracle")[0])
