"""Drawn traces have the statistics of their law, and laws those that were asked for."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from toolkit.sparsity import statistics
from toolkit.sparsity.synthetic import BetaLaw, Drift, UsageLaw, draw, draw_layers, ranks


def never(usage, persistence, tokens):
    """The chance that a neuron is never active, as the sum over all courses of a chain of two states."""
    total = 0.0
    for course in product((0, 1), repeat=tokens):
        chance = usage if course[0] else 1 - usage
        for before, now in pairwise(course):
            on = usage * (1 - persistence) + persistence * before
            chance *= on if now else 1 - on
        total += chance * (not any(course))
    return total


def test_usage_falls_as_a_power_of_rank():
    usage = UsageLaw(active=0.05, exponent=1, persistence=0).usage(1000)
    assert usage.mean() == pytest.approx(0.05)
    assert usage.max() <= 1
    free = usage[usage < 1]
    np.testing.assert_allclose(free / free[-1], 1000 / np.arange(1000 - len(free) + 1, 1001))
    assert UsageLaw(0.3, 0, 0).usage(10) == pytest.approx(np.full(10, 0.3))


@pytest.mark.parametrize("law", [UsageLaw(0.1, 1, 0.5), UsageLaw(0.3, 0.5, 0), UsageLaw(0.2, 2, 0.9)], ids=str)
def test_expected_usage_is_that_of_all_courses(law):
    for tokens in (1, 2, 5):
        expected = 1 - np.mean([never(usage, law.persistence, tokens) for usage in law.usage(20)])
        assert law.aggregated(tokens, 20) == pytest.approx(expected)


def test_a_drawn_trace_follows_its_law():
    laws = [UsageLaw(0.1, 1, 0.5), UsageLaw(0.25, 0.6, 0.0)]
    trace = draw("twin", laws, neurons=512, tokens=1200)
    usage, overlap = statistics.aggregated_usage(trace, 8), statistics.overlap(trace, [1, 2])
    for layer, law in enumerate(laws):
        found = usage[usage["layer"] == layer].set_index("tokens")["used"]
        for tokens in (1, 2, 5, 8):
            assert found[tokens] == pytest.approx(law.aggregated(tokens, 512), rel=0.05)
        for row in overlap[overlap["layer"] == layer].itertuples():
            shares = law.usage(512)
            chance = (shares**2).sum() / shares.sum()
            assert row.shared == pytest.approx(chance + law.persistence**row.distance * (1 - chance), rel=0.06)
    assert (trace.model, trace.units) == ("twin", (512, 512))
    assert torch.equal(draw("twin", laws, 512, 1200).bits[1], trace.bits[1])
    assert not torch.equal(draw("twin", laws, 512, 1200, seed=1).bits[1], trace.bits[1])


HERMES = BetaLaw(active=0.20, far=0.70, near=0.90)


def test_published_statistics_give_the_law():
    """Hermes, figures 3 and 4: 20 % active, 0.90 shared by neighbours, 0.70 far apart; 20 % do about 80 %."""
    assert HERMES.shape == pytest.approx((0.12, 0.48))
    assert HERMES.persistence == pytest.approx(2 / 3)
    usage = HERMES.usage(10_000)
    assert usage.mean() == pytest.approx(0.20)
    assert (usage**2).sum() / usage.sum() == pytest.approx(0.70, abs=1e-4)
    assert usage[:2000].sum() / usage.sum() == pytest.approx(0.785, abs=0.001)
    assert HERMES.shared(1) == pytest.approx(0.90)
    assert HERMES.shared(25) == pytest.approx(0.70, abs=1e-4)


def given_parent(copied):
    """The chance that a neuron is active where its parent is, after many tokens."""
    kept = HERMES.persistence
    return HERMES.far + copied * (1 - kept) / (1 - copied * kept - (1 - copied) * kept**2) * (1 - HERMES.far)


def test_children_and_parents_keep_the_law():
    neurons, tokens = 4096, 600
    layers = list(draw_layers([HERMES] * 3, neurons, tokens, copied=0.5))
    for layer, active in enumerate(layers):
        assert active.mean() == pytest.approx(0.20, abs=0.002)
        for distance in (1, 2, 40):
            shared = (active[distance:] & active[:-distance]).sum() / active[distance:].sum()
            assert shared == pytest.approx(HERMES.shared(distance), abs=0.006)
        by_rank = active[:, ranks(neurons, layer)].mean(0)
        np.testing.assert_allclose(by_rank, HERMES.usage(neurons), atol=6 * np.sqrt(0.25 * 5 / tokens))
        if layer:
            child, parent = active[:, ranks(neurons, layer)], layers[layer - 1][:, ranks(neurons, layer - 1)]
            assert (child & parent).sum() / parent.sum() == pytest.approx(given_parent(0.5), abs=0.006)


def test_drift_exchanges_the_usage_of_hot_and_cold_neurons():
    neurons, drift = 1000, Drift(0.52, hot=0.2, start=300)
    when, hot, cold = drift.exchanges(neurons, 900, seed=0)
    assert len(when) == 104 == len(set(hot)) == len(set(cold))
    assert (min(when) >= 300, max(when) < 900, max(hot) < 200, min(cold) >= 200) == (True,) * 4
    active = next(draw_layers([HERMES], neurons, 900, drift=drift))
    still = next(draw_layers([HERMES], neurons, 900))
    np.testing.assert_array_equal(active[:300], still[:300])
    place, usage = ranks(neurons, 0), HERMES.usage(neurons)
    for token, first, second in zip(when, hot, cold, strict=True):
        if 60 < token - 300 < 540 and usage[first] > 0.9 and usage[second] < 0.1:
            assert active[token + 20 :, place[first]].mean() < 0.5 < active[token + 20 :, place[second]].mean()
            assert active[:token, place[second]].mean() < 0.5 < active[:token, place[first]].mean()
    assert active.mean() == pytest.approx(0.20, abs=0.005)
