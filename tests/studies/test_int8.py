import copy

import pytest
import torch

from tests.offload.conftest import pruned
from toolkit.errors import UserError
from toolkit.evaluation import perplexity
from toolkit.pruning import Calibration
from toolkit.quantization.smoothquant import int8_activations, round_to_int8, smooth
from toolkit.studies import int8
from toolkit.studies.int8 import int8_quality

TOKENS = torch.arange(128) * 7 % 61
CALIBRATION = Calibration("text", sequence_length=16)


@pytest.fixture
def _tiny(monkeypatch):
    def smoothed(name, method, alpha, **settings):
        model = pruned("llama")
        smooth(model, TOKENS.view(-1, 16), alpha)
        return model, "tokenizer"

    monkeypatch.setattr(int8, "load_pruned", lambda *_, **settings: (pruned("llama"), "tokenizer", []))
    monkeypatch.setattr(int8, "load_smoothed", smoothed)
    monkeypatch.setattr(int8, "load_tokens", lambda *_: TOKENS)


@pytest.mark.usefixtures("_tiny")
def test_five_models_on_the_same_windows():
    table = int8_quality("tiny", CALIBRATION, evaluation_windows=4).set_index(["weights", "activations", "smoothed"])
    value = lambda model: float(perplexity(model, TOKENS, 16, 4))  # noqa: E731
    plain = pruned("llama")
    assert table.loc[("float32", "float32", False), "perplexity"] == value(plain)
    smoothed = copy.deepcopy(plain)
    smooth(smoothed, TOKENS.view(-1, 16))
    for label, model in ((False, plain), (True, smoothed)):
        round_to_int8(model)
        assert table.loc[("int8", "float32", label), "perplexity"] == value(model)
        with int8_activations(model):
            assert table.loc[("int8", "int8", label), "perplexity"] == value(model)
    assert len(set(table["perplexity"])) == len(table) == 5
    assert (table["over_pruned"] == table["perplexity"] / table["perplexity"].iloc[0]).all()
    assert set(table["windows"]) == {4}


@pytest.mark.usefixtures("_tiny")
def test_a_bad_alpha():
    with pytest.raises(UserError, match="alpha -1"):
        int8_quality("tiny", CALIBRATION, alpha=-1)
