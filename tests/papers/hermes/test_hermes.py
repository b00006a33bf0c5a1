"""Hermes's notebooks and what they share: tables of traces, placements, mappings and speeds worked by hand."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from tests.notebook_code import functions_of
from toolkit.kernels.neurons import ffn
from toolkit.machines.hardware import profile
from toolkit.papers.hermes import systems
from toolkit.papers.hermes.loads import Serving
from toolkit.papers.hermes.systems import (
    HIGH_END,
    MACHINE,
    FittedSet,
    SystemCase,
    shares,
)
from toolkit.papers.hermes.traces import ATTENTION, Drawing
from toolkit.predictors import All, CopyLast, Nothing
from toolkit.sparsity.trace import Trace, pack

fig03, fig04, fig07 = (functions_of(f"hermes/{name}") for name in ("fig03", "fig04", "fig07"))
LABELS = {"trace": "by hand", "evidence": "measured"}


def trace_of(*layers):
    """A trace of one sequence; each layer is rows of 0 and 1, one a token."""
    active = [torch.tensor(layer, dtype=torch.bool)[None] for layer in layers]
    tokens = torch.zeros(1, active[0].shape[1], dtype=torch.int32)
    return Trace("toy", "by hand", tokens, tuple(one.shape[2] for one in active), tuple(map(pack, active)))


def quantities(table):
    return table[table["row"] == "quantity"].set_index("quantity")["value"]


def test_hot_and_cold_by_hand():
    """Neuron 0 makes 8 of 10 activations of five neurons, neurons 1 and 2 one each."""
    layer = np.zeros((8, 5), int)
    layer[:, 0], layer[0, 1], layer[1, 2] = 1, 1, 1
    table = fig03.hot_cold_table(trace_of(layer), LABELS)
    found = quantities(table)
    assert found["activation sparsity"] == pytest.approx(75)  # 30 of 40
    assert found["activations of the hot neurons"] == pytest.approx(80)  # one of five neurons is hot
    assert found["neurons of most activations"] == pytest.approx(20)
    curve = table[table["row"] == "curve"].set_index("neuron_share")["activation_share"]
    assert np.interp([0.2, 0.4, 0.6, 1], curve.index, curve).tolist() == pytest.approx([0.8, 0.9, 1, 1])
    assert set(table["model"]) == {"toy"}
    assert set(table["trace"]) == {"by hand"}


def test_similarity_by_hand():
    """Tokens use {0, 1}, {0, 2}, {0, 1}, {0, 2}: neighbours share a half, tokens two apart everything."""
    layer = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0]]
    found = fig04.similarity_table(trace_of(layer), [1, 2], LABELS).set_index("distance")
    assert found["value"].to_dict() == pytest.approx({1: 50, 2: 100})
    assert found["chance"].to_numpy() == pytest.approx(100 * (1 + 0.25 + 0.25) / 2)  # Σ usage² / Σ usage
    assert set(found["unit"]) == {"percent"}


def test_correlation_by_hand():
    """Neuron 0 of the second layer does what neuron 1 of the first does; neuron 1 fires by turns with it, once more."""
    generator = np.random.default_rng(0)
    first = generator.random((400, 3)) < 0.3
    second = np.stack([first[:, 1], first[:, 2] | (np.arange(400) % 10 == 0)], 1)
    table = fig04.correlation_table(trace_of(first, second), LABELS)
    pairs = table[table["row"] == "pair"].set_index("neuron")
    assert pairs["given"].to_dict() == {0: 1, 1: 1}
    assert pairs.loc[0, "usage"] == pytest.approx(first[200:, 1].mean())
    assert pairs.loc[1, "usage"] > pairs.loc[0, "usage"] - 0.1
    found = table[table["row"] == "quantity"].set_index("quantity")
    assert found.loc["fires with its parent", "value"] == 100
    assert found.loc["fires with its parent", "chance"] == pytest.approx(100 * pairs["usage"].mean())
    assert found.loc["pairs that are sure", "value"] == 100
    assert found.loc["pairs that are sure", "chance"] == 0


def test_quality_by_hand():
    """One of four neurons is active, always the same: nothing is right for 75 %, all for 25 %, a copy for 100 %."""
    layer = [[1, 0, 0, 0]] * 6
    kinds = {"nothing": [Nothing(4, 0)], "all": [All(4, 0)], "copy": [CopyLast(4, 0)]}
    found = fig07.quality_table(kinds, trace_of(layer), 2, LABELS).set_index("label")
    assert found["active"].tolist() == pytest.approx([0.25] * 3)
    assert found["accuracy"].tolist() == pytest.approx([0.75, 0.25, 1])
    assert found["predicted"].tolist() == pytest.approx([0, 1, 0.25])
    assert found["recall"].tolist() == pytest.approx([0, 1, 1])
    assert found["nbytes"].tolist()[:2] == [0, 0]


fig08 = functions_of("hermes/fig08")
PROMPT, PLACEMENTS = fig08.PROMPT, fig08.PLACEMENTS

# two groups of neurons that fire in turn, one in each half of ten: 0 to 4 and 5 to 9; 10 and 11 always fire
TOKENS = np.zeros((PROMPT + 40, 12), dtype=bool)
TOKENS[::2, :5] = TOKENS[1::2, 5:10] = TOKENS[:, 10:] = True


def test_hot_neurons_are_the_most_used():
    assert np.flatnonzero(fig08.hot_neurons(TOKENS[:PROMPT])).tolist() == [10, 11]
    assert fig08.hot_neurons_lost(TOKENS) == 0
    later = TOKENS.copy()
    later[PROMPT:, 10] = False
    later[40:, 0] = True  # neuron 0 takes the place of neuron 10
    assert fig08.hot_neurons_lost(later) == 0.5


def test_clusters_put_neurons_together_that_fire_together():
    dimm = PLACEMENTS["clustered"](TOKENS[:PROMPT, :10], 2)
    assert len(set(dimm[:5])) == len(set(dimm[5:])) == 1
    assert dimm[0] != dimm[5]


def test_imbalance_by_hand():
    """On two DIMMs each group has one to itself: a token finds all its neurons on one of them."""
    table = fig08.imbalance_table([TOKENS], 2, [0, 4]).set_index(["placement", "window"])
    fixed = table.loc[("clustered", 0)]
    assert fixed["imbalance"] > 1.6
    assert np.isnan(fixed["moved"])
    assert (table.xs(4, level="window")["imbalance_after"] <= table.xs(4, level="window")["imbalance_before"]).all()


def test_migration_by_hand():
    """1,000 neurons of 25 MB: four pairs move 6.25 GB each, in 0.25 s; the host moves 50 GB."""
    found = fig08.migration(1000, layers=1, neuron_bytes=25_000_000, window=5, tokens_s=10, dimms=8).set_index(
        "through"
    )
    assert found.loc["DIMM-link", "seconds"] == pytest.approx(0.25)
    assert found.loc["DIMM-link", "time_percent"] == pytest.approx(100 * 0.25 / 0.75)
    assert found.loc["host", "seconds"] == pytest.approx(50 / 25.6)
    assert found["slower"].tolist() == pytest.approx([1, 50 / 25.6 / 0.25, 62])


GPU = -1


@pytest.mark.parametrize("places", [[GPU, 0, 1, 2], [GPU], [2], [0, 1]], ids=["all", "gpu alone", "one dimm", "no gpu"])
def test_a_divided_ffn_gives_the_undivided_sum_and_counts_active_bytes(places):
    """Also where all cold neurons lie on one DIMM, and where a place holds none."""
    generator = np.random.default_rng(1)
    neurons, hidden = 40, 16
    bundles, x = (torch.randn(*shape, generator=torch.manual_seed(1)) for shape in ((neurons, 3 * hidden), (hidden,)))
    gate, up, down = bundles.split(hidden, 1)
    outputs = torch.relu(gate @ x) * (up @ x)
    active, place = (outputs != 0).numpy(), generator.choice(places, neurons).astype(np.int8)
    sums, kib, seconds = functions_of("hermes/fig13").divided_product(
        bundles, partial(ffn, x=x, activation="relu"), active, place, dimms=3
    )
    torch.testing.assert_close(sums, outputs @ down)
    assert 1024 * kib[1:] == pytest.approx([12 * hidden * (active & (place == dimm)).sum() for dimm in range(3)])
    assert kib.sum() == pytest.approx(12 * hidden * active.sum() / 1024)
    assert ((seconds > 0) == (kib > 0)).all()


LLAMA, OPT = "llama2-70b", "opt-13b"
fig14 = functions_of("hermes/fig14")
visit_gb_s = fig14.visit_gb_s


def test_a_fitted_set_keeps_the_multiply_adds_of_a_byte():
    own = profile(MACHINE).near_data
    twice = FittedSet(0.2, 2 * own.bandwidth_gb_s).on(profile(MACHINE)).near_data
    assert twice.bandwidth_gb_s == 2 * own.bandwidth_gb_s
    assert twice.tflop_s == pytest.approx(2 * own.tflop_s)
    assert twice.dimms == own.dimms
    without = profile(HIGH_END)
    assert FittedSet(0.2, 1.0).on(without) is without


def test_shares_by_hand():
    """PCIe adds 9 of 10 ms; the predictor takes 0.2 of the 1 that is left; DIMMs 3 of 4 ms; prefill a third."""
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


def test_a_drawing_has_the_blocks_of_its_model():
    small = Drawing("llama2-7b", layers=2, tokens=12, prompt=4)
    ffn, attention = small.trace(), small.trace(ATTENTION)
    assert (ffn.units, attention.units, attention.unit) == ((11008,) * 2, (4096,) * 2, ATTENTION)
    assert ffn.active(0).float().mean().item() == pytest.approx(small.law.active, abs=0.03)


# GB/s of a cycle-accurate simulator (Ramulator 2.1) with HERMES's timings: bursts a visit, refresh, rate
SIMULATED = [
    *((128, False, 25.600), (2, False, 21.005), (1, False, 10.779)),
    *((128, True, 23.712), (8, True, 23.669), (2, True, 19.579), (1, True, 9.982)),
    *((128, False, 24.910), (128, True, 23.073)),  # four ranks that share a bus
]


def test_rates_are_within_3_percent_of_a_cycle_accurate_simulator():
    for bursts, refreshes, gb_s in SIMULATED:
        assert visit_gb_s(64 * bursts, refreshes=refreshes) == pytest.approx(gb_s, rel=0.03)


def test_a_visit_of_one_burst_is_limited_by_banks_by_hand():
    """Eight banks, each opened once in 76 cycles of 0.625 ns: 8 · 64 bytes in 47.5 ns."""
    assert visit_gb_s(64, refreshes=False) == pytest.approx(8 * 64 / 47.5)
    assert visit_gb_s(1, refreshes=False) == pytest.approx(8 / 47.5)  # a burst brings one useful byte
