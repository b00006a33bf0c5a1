"""What Hermes's figures of speed share: numbers worked by hand, and rules about speeds that are given."""

import pandas as pd
import pytest

from tests.notebook_code import functions_of
from toolkit.costs.hardware import profile
from toolkit.costs.hot_cold_loads import Serving
from toolkit.papers.hermes import systems
from toolkit.papers.hermes.systems import (
    HIGH_END,
    MACHINE,
    FittedSet,
    SystemCase,
    shares,
)

LLAMA, OPT = "llama2-70b", "opt-13b"
fig14 = functions_of("hermes/fig14")


def test_a_fitted_set_keeps_the_multiply_adds_of_a_byte():
    own = profile(MACHINE).near_data
    twice = FittedSet(0.2, 2 * own.bandwidth_gb_s).on(profile(MACHINE)).near_data
    assert twice.bandwidth_gb_s == 2 * own.bandwidth_gb_s
    assert twice.tflop_s == pytest.approx(2 * own.tflop_s)
    assert twice.dimms == own.dimms
    without = profile(HIGH_END)
    assert FittedSet(0.2, 1.0).on(without) is without


def test_shares_by_hand():
    """Of 10 ms PCIe adds 9; the predictor takes 0.2 of the 1 that is left; DIMMs 3 of 4 ms; prefill a third."""
    labels = {"model": LLAMA, "system": "deja_vu", "batch": 1, "profile": MACHINE, "evidence": "modelled"}
    parts = {"token_ms": 10.0, "copy_ms": 9.0, "predictor_ms": 0.2, "dimm_ms": 3.0, "gpu_ms": 1.0}
    found = shares(pd.DataFrame([labels | parts | {"prefill_percent": 100 / 3}])).iloc[0]
    assert found["copy_percent"] == pytest.approx(90)
    assert found["predictor_percent"] == pytest.approx(20)
    assert found["dimm_percent"] == pytest.approx(75)
    assert found["prefill_percent"] + found["generation_percent"] == pytest.approx(100)
    assert found["part"] == "shares"


def test_the_share_on_the_gpu_by_hand():
    """20 GB less the head, over the blocks' 12 · hidden² weights of two bytes each; the paper has 80 and 15 %."""
    machine = profile(MACHINE)
    for model, layers, hidden, published in ((OPT, 40, 5120, 80), ("opt-66b", 64, 9216, 15)):
        share = (20e9 - 2 * 50272 * hidden) / (2 * layers * 12 * hidden**2)
        found = Serving(model).resident_share(machine)
        assert found == pytest.approx(share)
        assert 100 * found == pytest.approx(published, rel=0.05)


def test_dimms_that_hold_a_model():
    """OPT-66B's 132 GB need five DIMMs of 32 GB, as a count of bytes has it; five A100s have no DIMM."""
    assert [fig14.fits("opt-66b", dimms) for dimms in (1, 3, 5, 8)] == [False, False, True, True]
    assert fig14.fits(OPT, 1)


def test_the_first_steady_number():
    """Within 5 % of the last; what falls again is not steady."""
    for speeds, first in (([1, 10, 10, 10], 32), ([5, 9.49, 9.5, 10], 64), ([10, 9, 10, 10], 64), ([1, 2, 3, 4], 128)):
        assert fig14.first_steady(pd.Series(speeds, index=[16, 32, 64, 128])) == first


def test_the_table_has_the_default_set_and_the_range_along_the_others(monkeypatch):
    """A speed of 1 / active: 10 by default, 2 at the other end."""
    sets = (FittedSet(0.1, 40.0), FittedSet(0.5, 150.0))

    def row(asked, chosen, *sample):
        numbers = {"tokens_per_s": 1 / chosen.active, "token_ms": chosen.active, "prefill_percent": 1}
        return pd.DataFrame([{"model": asked.model} | numbers])

    monkeypatch.setattr(systems, "fitted_sets", lambda *sample: sets)
    monkeypatch.setattr(systems, "_row", row)
    found = systems.systems_table([SystemCase(LLAMA, "hermes", 1), SystemCase(LLAMA, "hermes_base", 1)])
    assert found["tokens_per_s"].tolist() == [10, 10]
    assert found["tokens_per_s_low"].tolist() == [2, 2]
    assert found["tokens_per_s_high"].tolist() == [10, 10]
    assert found["token_ms_high"].tolist() == [0.5, 0.5]
    assert set(found["part"]) == {"systems"}
