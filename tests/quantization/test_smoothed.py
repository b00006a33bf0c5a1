"""The memoised way in: factors are made once; `tests/cache` has what makes results anew."""

import pytest
import torch

from tests.offload.conftest import pruned
from toolkit.quantization import smoothquant
from toolkit.quantization.smoothquant import load_smoothed, smooth, smoothing_factors
from toolkit.sparsity import Calibration, calibration

CALIBRATION = Calibration(windows=3, sequence_length=16)
TOKENS = torch.arange(200) * 7 % 61


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A tiny model and text in place of the real ones, an empty cache, and the arguments of each making."""
    made = []

    def counted(model, windows, alpha):
        made.append(alpha)
        return smoothing_factors(model, windows, alpha)

    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(smoothquant, "load_pruned", lambda *_, **settings: (pruned("llama"), "tokenizer", []))
    monkeypatch.setattr(calibration, "load_tokens", lambda corpus, tokenizer, split: TOKENS)
    monkeypatch.setattr(smoothquant, "smoothing_factors", counted)
    return made


def test_the_second_call_reads_what_the_first_made(bench):
    (first, tokenizer), (second, _) = (
        load_smoothed("llama", calibration=CALIBRATION),
        load_smoothed("llama", calibration=CALIBRATION),
    )
    assert bench == [0.5]
    assert tokenizer == "tokenizer"
    expected = pruned("llama")
    smooth(expected, CALIBRATION.draw(TOKENS))
    for name, parameter in expected.named_parameters():
        assert torch.equal(first.get_parameter(name), parameter), name
        assert torch.equal(second.get_parameter(name), parameter), name
    assert not torch.equal(first.model.layers[0].input_layernorm.weight, torch.ones(48))
