"""What several of CORM's notebooks share: tables over ways, corners and texts."""

from dataclasses import replace

import pandas as pd
import pytest

from tests.notebook_code import functions_of
from toolkit.costs.experts import BREAKDOWN, CORM, DEFAULTS, ON_DEMAND, SPARSE, LoadingInputs
from toolkit.papers.corm import latency
from toolkit.papers.corm.latency import (
    OFFLOAD,
    corners,
    ends,
    latency_table,
    matters,
    real_hits,
    routed_table,
    seconds,
)
from toolkit.sparsity.route_traces import ROUTE_TRACES

MIXTRAL = "mixtral-8x7b"
fig07, fig08 = functions_of("corm/fig07"), functions_of("corm/fig08")


def test_inputs_matter_to_the_ways_that_use_them():
    found = {way.name: {name for name in ends(MIXTRAL) if matters(MIXTRAL, way, name)} for way in (ON_DEMAND, SPARSE)}
    assert found == {"B": set(), "+S": {"low_bits", "fixed_scales", "gathers_beside"}}


def test_corners_are_all_ends_together():
    assert corners(MIXTRAL, [ON_DEMAND]) == [DEFAULTS]
    assert len(corners(MIXTRAL, [SPARSE])) == 2**3
    assert LoadingInputs(slots=7, reused=0.9, low_bits=0.5, overlap=0.8, gathers_beside=True) in [
        replace(each, accuracy=DEFAULTS.accuracy) for each in corners(MIXTRAL, [CORM])
    ]


def test_the_table_has_its_default_within_its_range():
    table = latency_table([MIXTRAL], BREAKDOWN)
    assert (table["speedup_low"] <= table["speedup"]).all()
    assert (table["speedup"] <= table["speedup_high"]).all()
    assert table["speedup"].tolist() == sorted(table["speedup"])
    assert (table["prefetched_mb"] <= table["loaded_mb"]).all()
    assert table.set_index("way")["speedup"]["B"] == 1
    assert latency_table([MIXTRAL], BREAKDOWN, null=True)["compute_ms"].max() == 0


def test_texts_add_a_prompt_and_its_tokens():
    table = fig07.texts([MIXTRAL], {way.name: way for way in (ON_DEMAND, CORM, OFFLOAD)}, [64])
    row = table[(table["way"] == "+C") & (table["tokens"] == 32)].iloc[0]
    assert row["seconds"] == pytest.approx(row["prefill_s"] + 32 * seconds(MIXTRAL, DEFAULTS, CORM))
    found = fig07.gains(table, ["B", "mixtral-offload"])
    each = found[(found["part"] == "gain") & (found["over"] == "B")]
    assert each["tokens"].tolist() == list(fig07.LENGTHS)
    assert each["speedup"].is_monotonic_increasing
    mean = found[(found["part"] == "mean") & (found["over"] == "B")]["speedup"].item()
    assert mean == pytest.approx(each["speedup"].mean())


def test_conclusions_count_corners():
    table = fig08.conclusions(MIXTRAL).set_index("conclusion")
    assert set(table.index) == set(fig08.CONCLUSIONS)
    assert table["sets"].nunique() == 1
    assert table["holds_on"]["+S is faster than experts on demand"] == table["sets"].iloc[0]
    assert table["holds_on"]["CORM is faster than all experts in INT4 on the GPU"] == 0


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
