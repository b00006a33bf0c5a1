"""The published numbers in `data/claims`: whole, consistent, and as the papers have them."""

import pandas as pd
import pytest

from toolkit import paths
from toolkit.costs.hardware import profiles
from toolkit.evidence import literature
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.claims import KINDS, UNITS, claims

PAPERS = sorted(file.stem for file in (paths.root() / "data" / "claims").iterdir())
# typed from the papers, apart from the files
SPOT_VALUES = [
    ("endor/tab_e2e-llama-remapped-direct", 24, "s"),
    ("endor/fig06-cpu-speedup", 1.3, "speedup"),
    ("endor/fig04-bitmap-int8", 42, "MB"),
    ("flash/tab02-bundling-io", 87, "ms"),
    ("flash/tab03-opt-metal-m2-all-total", 305, "ms"),
    ("flash/tab03-repeated-persimmon-cpu-all-compute-deviation", 24.76, "ms"),
    ("flash/tab01-phi2-predicted-0.55-arc_challenge", 47.9, "percent"),
    ("flash/tab06-layer32-quantised", 5.45, "percent"),
    ("spqr/fig4_2-ptcsr", 3.74, "speedup"),
    ("spqr/fig4_3-a100-ptcsr-median", 0.0121, "s"),
    ("spqr/tab1_1-softmax-bytes", 262e3, "bytes"),
    ("hermes/fig10-llama70b", 13.75, "tokens/s"),
    ("hermes/fig07-state-table", 232, "KB"),
    ("hermes/fig17-batch-16", 24.4, "percent"),
    ("corm/tab02-deepseek-corm-mmlu", 43.7, "percent"),
    ("corm/tab03-mixtral-corm-overlap", 328, "ms"),
    ("corm/fig06-imbalance-16", 5.56, "ratio"),
    ("hermes/fig14-tabii-tfaw", 26, "cycles"),
    ("spqr/fig4_3-accuracy-loss", 1, "points"),
    ("endor/fig03-fc-share", 66, "percent"),
    ("corm/fig07-deepseek-over-mixtral-offload-128", 1.27, "speedup"),
]


@pytest.fixture(scope="module")
def records() -> pd.DataFrame:
    """Every record of every paper, by `<paper>/<id>`."""
    table = pd.concat(claims(paper).assign(paper=paper) for paper in PAPERS)
    table.index = table["paper"] + "/" + table["id"]
    assert table.index.is_unique
    return table


def test_records_are_whole_and_as_the_papers_have_them(records):
    assert set(PAPERS) <= literature.PAPERS.keys()
    assert set(records["figure"]) <= notebooks().keys()
    assert [id for id, figure in records["figure"].items() if not id.startswith(f"{figure}-")] == []
    assert set(records["unit"]) == set(UNITS)
    assert records.loc[records["unit"] == "percent", "value"].between(0, 100).all()
    assert set(records.loc[records["value"] < 0, "unit"]) == {"points"}
    for paper, rows in records.groupby("paper"):
        assert set(rows["kind"]) == set(KINDS), paper
    assert [(claim, *records.loc[claim, ["value", "unit"]]) for claim, _, _ in SPOT_VALUES] == SPOT_VALUES


def test_inputs_are_what_the_profiles_sources_name_and_nothing_else(records):
    """Both ways: what a profile was derived from is an input, and each input is named by a source or says its use."""
    named = {
        f"{machine.paper}/{id}"
        for machine in profiles().values()
        for source in machine.sources.values()
        for id in source.claims
    }
    inputs = records[(records["kind"] == "input") & records["input_of"].isna()]
    assert set(records.loc[records["input_of"].notna(), "kind"]) == {"input"}
    counted = (inputs["paper"] + "/" + inputs["same_as"].fillna(inputs["id"])).unique()
    assert named == set(counted)


def test_the_parts_of_a_latency_add_up_to_its_total(records):
    """FLASH tables 3 and 5 (means): I/O, memory management and compute, each rounded."""
    value = records["value"]
    totals = [id for id in records.index if id.startswith("flash/tab03-") and id.endswith("-total")]
    assert len(totals) == 21 + 5
    for id in totals:
        parts = [value[id.removesuffix("total") + part] for part in ("io", "memory", "compute")]
        assert sum(parts) == pytest.approx(value[id], abs=1.0), id


def test_a_speed_up_is_the_quotient_of_its_times(records):
    """ENDOR sections 5.1, 5.2 and C.3, up to the rounding of the times."""
    value = records["value"]
    variants = {"opt": ("endor", "direct"), "llama": ("endor", "direct", "remapped", "remapped-direct")}
    for model, names in variants.items():
        stem = f"endor/tab_e2e-{model}-"
        for name in names:
            assert value[stem + "dense"] / value[stem + name] == pytest.approx(value[f"{stem}{name}-speedup"], 0.005)


def test_intensity_is_operations_over_bytes(records):
    """SpQR table 1.1; the norm's two numbers are too coarse for better than 4 %."""
    value = records["value"]
    rows = [id.removesuffix("intensity") for id in records.index if id.endswith("-intensity")]
    assert len(rows) == 12
    for row in rows:
        assert value[row + "ops"] / value[row + "bytes"] == pytest.approx(value[row + "intensity"], 0.04), row


def test_differences_and_overlaps_follow_from_their_tables(records):
    """CORM tables 2, 3 and 4."""
    value = records["value"]
    for model in ("mixtral", "deepseek"):
        for task in ("piqa", "winogrande", "mmlu"):
            change = value[f"corm/tab02-{model}-corm-{task}"] - value[f"corm/tab02-{model}-{task}"]
            assert change == pytest.approx(value[f"corm/tab02-{model}-difference-{task}"], abs=1e-6)
        token, loading, compute, overlap = (
            value[f"corm/tab03-{model}-corm-{part}"] for part in ("token", "loading", "compute", "overlap")
        )
        assert loading + compute - overlap == token
        share = 100 * value[f"corm/tab04-{model}-predictor"] / value[f"corm/tab04-{model}-token"]
        assert share == pytest.approx(value[f"corm/tab04-{model}-share"], abs=0.005)
