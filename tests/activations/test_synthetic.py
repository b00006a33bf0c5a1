"""Drawn traces have the statistics of their law, and laws those that were asked for."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from toolkit.activations import statistics
from toolkit.activations.synthetic import UsageLaw, draw
from toolkit.errors import UserError


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


def test_opt_of_the_paper():
    """Appendix C.1: 10 % are predicted to be active, 2.4 % are new to a window of 4; memory for 24 % suffices."""
    law = UsageLaw.fit(active=0.10, exponent=1, new=0.024, tokens=5)
    assert law.new(5) == pytest.approx(0.024, rel=1e-3)
    assert law.aggregated(1) == pytest.approx(0.10)
    assert 0.10 < law.aggregated(5) < 0.24


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"active": 0}, "active 0"),
        ({"exponent": -1}, "exponent -1"),
        ({"tokens": 1}, "1 tokens"),
        ({"new": 0.5}, "new 0.5: expected 0.0000 to 0.0386"),
        ({"new": -0.1}, "new -0.1: expected"),
    ],
)
def test_laws_that_do_not_exist_are_refused(changed, told):
    with pytest.raises(UserError, match=told):
        UsageLaw.fit(**{"active": 0.1, "exponent": 1, "new": 0.02, "tokens": 5} | changed)
    with pytest.raises(UserError, match="0 layers, 4 neurons, 4 tokens"):
        draw("twin", [], 4, 4)
