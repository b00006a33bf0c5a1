"""Traces: recorded as the activations say, kept in files, refused where they do not fit."""

import pytest
import torch

from tests.sparsity.test_thresholds import outputs_of
from toolkit.errors import UserError
from toolkit.sparsity import Magnitudes, Trace, record, thresholded
from toolkit.sparsity.trace import pack


@pytest.mark.parametrize("family", ["llama", "opt"])
@torch.no_grad()
def test_the_trace_says_which_outputs_exceed_the_threshold(tiny, tokens, family):
    model = tiny(family, **({"intermediate_size": 21} if family == "llama" else {"ffn_dim": 21}))
    limits = Magnitudes.measure(model, tokens, sequence_length=16).thresholds(0.6)
    trace = record(model, "tiny", tokens, "random", limits, windows=3, sequence_length=16)
    assert (trace.model, trace.corpus, trace.units) == ("tiny", "random", (21, 21, 21))
    assert torch.equal(trace.tokens.long(), tokens[:48].view(3, 16))
    with thresholded(model, limits):
        outputs = outputs_of(model, trace.tokens.long())
    for layer in range(3):
        expected = outputs[layer].view(3, 16, 21).abs() > limits[layer]
        assert torch.equal(trace.active(layer), expected)
        assert 0 < expected.float().mean() < 1


@torch.no_grad()
def test_without_thresholds_a_relu_decides(tiny, tokens):
    model = tiny("opt")
    trace = record(model, "tiny", tokens, "random", windows=1, sequence_length=16)
    (outputs, *_) = outputs_of(model, tokens[None, :16])
    assert torch.equal(trace.active(0)[0], outputs > 0)
    assert 0.2 < trace.active(0).float().mean() < 0.8


def test_bits_lie_lowest_first():
    active = torch.zeros(1, 10, dtype=torch.bool)
    active[0, [0, 3, 9]] = True
    assert pack(active).tolist() == [[0b1001, 0b10]]


def test_a_file_gives_the_trace_back(trace, tmp_path):
    kept = trace()
    kept.save(tmp_path / "trace")
    found = Trace.load(tmp_path / "trace", "tiny")
    assert (found.units, found.unit, found.corpus) == (kept.units, kept.unit, kept.corpus)
    assert all(torch.equal(one, other) for one, other in zip(found.bits, kept.bits, strict=True))
    with pytest.raises(UserError, match="trace of model 'tiny'; expected 'opt': make a file for this model"):
        Trace.load(tmp_path / "trace", "opt")


def test_experts_have_weights_of_the_router_and_no_thresholds(tmp_path):
    weights = torch.tensor([[[0.75, 0.25, 0, 0], [0, 0.5, 0, 0.5]]])
    ids = torch.tensor([[7, 8]], dtype=torch.int32)
    Trace("mixture", "by hand", ids, (4,), (pack(weights > 0),), "expert", weights=(weights,)).save(tmp_path / "trace")
    experts = Trace.load(tmp_path / "trace", "mixture")
    assert (experts.unit, experts.thresholds) == ("expert", None)
    assert torch.equal(experts.weights[0], weights)
