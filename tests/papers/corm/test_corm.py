"""CORM: latencies of schedulings, corners and texts; the loading rule; the time of a predictor."""

import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from tests.notebook_code import functions_of
from toolkit.models.architectures import ARCHITECTURES, ModelShape
from toolkit.papers.corm import latency
from toolkit.papers.corm.cost_model import BREAKDOWN, CORM, DEFAULTS, ON_DEMAND
from toolkit.papers.corm.latency import (
    OFFLOAD,
    latency_table,
    real_hits,
    routed_table,
    seconds,
)
from toolkit.papers.corm.load_rule import (
    DISK,
    GATHERED,
    WHOLE,
    Link,
    load_times,
)
from toolkit.sparsity.route_traces import ROUTE_TRACES

MIXTRAL = "mixtral-8x7b"
fig07 = functions_of("corm/fig07")


def test_the_table_has_its_default_within_its_range():
    table = latency_table([MIXTRAL], BREAKDOWN)
    assert (table["speedup_low"] <= table["speedup"]).all()
    assert (table["speedup"] <= table["speedup_high"]).all()
    assert table["speedup"].tolist() == sorted(table["speedup"])
    assert (table["prefetched_mb"] <= table["loaded_mb"]).all()
    assert table.set_index("way")["speedup"]["B"] == 1
    assert latency_table([MIXTRAL], BREAKDOWN, null=True)["compute_ms"].max() == 0


def test_texts_add_a_prompt_and_its_tokens():
    table = fig07.texts([MIXTRAL], {scheduling.name: scheduling for scheduling in (ON_DEMAND, CORM, OFFLOAD)}, [64])
    row = table[(table["way"] == "+C") & (table["tokens"] == 32)].iloc[0]
    assert row["seconds"] == pytest.approx(row["prefill_s"] + 32 * seconds(MIXTRAL, DEFAULTS, CORM))
    found = fig07.gains(table, ["B", "mixtral-offload"])
    each = found[(found["part"] == "gain") & (found["over"] == "B")]
    assert each["tokens"].tolist() == list(fig07.LENGTHS)
    assert each["speedup"].is_monotonic_increasing
    mean = found[(found["part"] == "mean") & (found["over"] == "B")]["speedup"].item()
    assert mean == pytest.approx(each["speedup"].mean())


@pytest.fixture
def own_hits(monkeypatch):
    """Our mixture's routing, without the model: 4 of 8 experts, of which half are there."""
    row = {"policy": "lru", "memory": 0.5, "slots": 4, "experts": 8, "expert_hits": 0.5}

    def policies(setting, shares, policies):
        return pd.DataFrame([row | {"memory": share} for share in shares])

    monkeypatch.setattr(latency, "own_policies", policies)
    latency._hits.cache_clear()
    yield row
    latency._hits.cache_clear()


def test_real_routing_takes_the_place_of_chance(own_hits):
    table = routed_table([MIXTRAL])
    assert set(table["routing"]) == set(ROUTE_TRACES)
    hits = real_hits([0.25]).set_index("model")["expert_hits"]
    for row in table[table["way"] == "+C"].itertuples():
        assert row.expert_hits == hits[row.routing]
        expected = seconds(MIXTRAL, replace(DEFAULTS, hit_rate=hits[row.routing]), CORM)
        assert row.token_ms == pytest.approx(1e3 * expected)
        assert row.speedup == pytest.approx(seconds(MIXTRAL, DEFAULTS, ON_DEMAND) / expected)


fig09 = functions_of("corm/fig09")


def test_the_crossing_by_hand():
    for ms, whole_ms, expected in (
        ([1.0, 2.0, 3.0], 2.5, 62.5),  # halfway from 0.5 to 0.75
        ([1.0, 2.0, 3.0], 1.0, 0.0),
        ([1.0, 2.0, 3.0], 3.5, 100.0),
        ([1.0, 3.0, 1.0], 2.0, 37.5),  # the first crossing counts
    ):
        assert fig09.limit_of(np.array([25.0, 50.0, 75.0]), np.array(ms), whole_ms) == expected


def test_crossings_with_and_without_decompression():
    whole = {"way": WHOLE, "share": 1.0, "compress_s": 0.0}
    rows = [whole | {"seconds": seconds, "load_s": seconds} for seconds in (5.0, 4.0)]  # by two readers
    rows += [
        {"way": GATHERED, "share": s, "seconds": 8 * s, "compress_s": s, "load_s": 4 * s}
        for s in (0.25, 0.5, 0.75, 1.0)
    ]
    times = pd.DataFrame(rows).assign(model="m", tier=DISK, bits=4, evidence="measured", gap_bytes=0)
    times = times.assign(seconds_low=0.0, seconds_high=0.0, decompress_s=0.0)
    found = fig09.crossings(fig09.in_ms(times)).set_index("use")["limit_percent"]
    assert found.to_dict() == {"decompressed": 50, "as they come": pytest.approx(80)}


def test_a_paced_copy_takes_what_its_link_would():
    source, target = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    link = Link("slow", gb_s=1.0, fixed_s=0.02)
    begun_s = time.perf_counter()
    link.copy(source, target)
    assert time.perf_counter() - begun_s >= 0.02 + 8e-6
    assert torch.equal(source, target)


def test_every_tier_way_and_share_has_a_row(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(ARCHITECTURES, "tiny", ModelShape(1, 64, 40, 1, 10, 1, 64, experts=2, experts_per_token=1))
    times = load_times("tiny", (16, 4, 2), (0.1, 1.0), (Link("paced", 10.0, 1e-4),), repetitions=2)
    readers = len(set(times.loc[times["tier"] == DISK, "mode"]))
    wholes = readers + 2  # two of them, unless the system refuses one
    assert len(times) == 3 * (wholes + 2 * (2 + 1 + 1))  # bits · (whole by tier, shares · (two gaps, memory, link))
    assert times[times["way"] == WHOLE].groupby("tier").size().to_dict() == {DISK: 3 * readers, "dram": 3, "paced": 3}
    assert (times["seconds"] > 0).all()
    assert times.groupby("tier")["evidence"].first().to_dict() == {
        "disk": "measured",
        "dram": "measured",
        "paced": "modelled",
    }
    paced = times[times["tier"] == "paced"]
    assert (paced["load_s"] >= 1e-4).all()
    sums = times[["compress_s", "load_s", "decompress_s"]].sum(axis=1)
    assert (sums > 0).all()
    limits = fig09.crossings(fig09.in_ms(times))
    assert len(limits) == 3 * 2 * (2 + 1)
    assert limits["limit_percent"].between(0, 100).all()
    assert times["stored_bytes"].unique().tolist() == [40 * 384, 40 * 192, 40 * 128]


TINY = ModelShape(2, 64, 96, 2, 100, 2, 32, experts=4, experts_per_token=2)
tab04 = functions_of("corm/tab04")


def test_the_parts_compute_what_they_say():
    inputs = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    predictor, experts = (tab04.Part(name, TINY, inputs) for name in ("predictor", "experts"))
    gates = [inputs[0] @ gate.float().T for gate in predictor.used]
    expected = [torch.nn.functional.silu(gate).abs() > tab04.LIMIT for gate in gates]
    for mask, wanted in zip(predictor.token(0), expected, strict=True):
        assert (mask != wanted).float().mean() < 0.05  # rounding, at the limit
    shares = (experts.router.float() @ inputs[0]).topk(2).values.softmax(0)
    total = sum(share * _ffn(rows.float(), inputs[0]) for share, rows in zip(shares, experts.used, strict=True))
    torch.testing.assert_close(experts.token(0)[0], total, rtol=1e-3, atol=1e-3)


def _ffn(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = rows.chunk(3, dim=1)
    return (torch.nn.functional.silu(gate @ x) * (up @ x)) @ down
