import pandas as pd
import pytest

from tests.models.test_twins import TOYS
from tests.notebook_code import functions_of
from tests.papers.endor.test_operations import MACHINE
from toolkit import paths
from toolkit.evidence.stage_tables import LABELS
from toolkit.measure import race as races
from toolkit.measure import turns as measure_turns
from toolkit.measure.race import Race, race_spans
from toolkit.models import shapes
from toolkit.models.workload import Workload
from toolkit.papers.endor import rates
from toolkit.papers.endor.cost_model import with_rates
from toolkit.papers.endor.passes import pairs_table

RATED = with_rates(MACHINE, "dram", decode_gb_s={"endor": 10.0, "zstd": 1.0}, matvec_gb_s={"dense": 20.0, "endor": 9.0})
BOOK = functions_of("endor/tab_e2e")
METHODS = ("dense", "dense_packed", "endor", "endor_packed")


def toy_passes(model="toy-opt", layers=4, methods=METHODS, repetitions=1):
    return Race(Workload(model), layers, BOOK.paper_ways(methods), repetitions)


@pytest.fixture(scope="module", autouse=True)
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "cache_dir", lambda: folder)
        patch.setitem(shapes.SHAPES, "toy-opt", TOYS["toy-opt"])
        patch.setattr(rates, "this_machine", lambda *arguments: RATED)
        patch.setattr(measure_turns, "describe", lambda: {"cpu": "toy"})
        yield


@pytest.fixture(scope="module")
def table(toy):
    return BOOK.pass_measurements(toy_passes())


def test_every_way_has_its_rows_and_accelerate_no_modelled_ones(table):
    labels = [name for name in LABELS if name in table]
    assert not table.duplicated(labels).any()
    assert table[labels].notna().all(axis=None)
    kinds = table.groupby("method")["evidence"].unique().map(set).to_dict()
    assert kinds == {"accelerate": {"measured"}, **{name: {"measured", "modelled"} for name in METHODS}}
    measured = table[table["evidence"] == "measured"]
    found = {tuple(name) for name in measured[["method", "policy", "mapping"]].drop_duplicates().to_numpy()}
    assert found == {(way.method, way.policy, mapping) for way, mapping in BOOK.paper_ways(METHODS)}


def test_the_model_counts_layers_where_the_map_has_them(table):
    """By hand: 4 layers of 229,376 B dense, 0.5625 of that packed; the disk gives 3 GB/s."""
    modelled = table[(table["evidence"] == "modelled") & (table["stage"] == "read")]
    seconds = modelled.set_index(["method", "policy", "mapping"])["seconds"]
    assert seconds["dense", "sequential", "storage"] == pytest.approx(4 * 229_376 / 3e9)
    assert seconds["dense", "sequential", "published"] == pytest.approx(3 * 229_376 / 3e9)
    assert seconds["endor", "pipelined", "storage"] == pytest.approx(4 * 0.5625 * 229_376 / 3e9, rel=0.1)  # and offsets


def test_pairs_are_made_from_what_was_measured_before(table, monkeypatch):
    monkeypatch.setattr(races, "run_race", None)  # measuring again would fail
    pairs = pairs_table(race_spans(toy_passes()))
    assert len(pairs) == 6  # llama.cpp is not among the default ways; three are one method by both policies


STORED = {"dense": 160, "endor": 90, "endor_packed": 90, "accelerate": 160, "llama.cpp F16": 160}


def turns(read: float = 1.0, **seconds: list[float]) -> pd.DataFrame:
    """Windows over 4 tokens and 5 layers that take these seconds, turn by turn, and read this share of their bytes."""
    rows = [
        {"method": method.replace("llama_cpp", "llama.cpp F16"), "repetition": number, "end_s": end_s}
        for method, ends in seconds.items()
        for number, end_s in enumerate(ends, 1)
    ]
    shared = {"mapping": "storage", "stage": "read", "op": "fc1", "tier": "storage", "layer": 0, "start_s": 0.0}
    shared |= {"memory_bytes": float("inf"), "mode": "direct", "disturbed": False, "measured_at": "now"}
    tables = [pd.DataFrame(rows).assign(**shared, tokens=4, storage_layers=5, token=token) for token in range(4)]
    table = pd.concat(tables, ignore_index=True)
    stored = table["method"].map(STORED)
    ours = table["method"].isin(METHODS)
    policy = ours.map({True: "pipelined", False: "sequential"})
    return table.assign(policy=policy, stored_bytes=stored, nbytes=(read * stored).astype(int))


def test_pairs_by_hand():
    """160 bytes over 90 allow 1.78 times as fast: a fault is a ratio above it in every turn."""
    pairs = pairs_table(turns(dense=[2, 4, 3], endor=[1, 4, 2], accelerate=[6, 4, 4.0])).set_index("other")
    assert pairs["ratio"].to_dict() == {"dense, pipelined": 1.5, "accelerate, sequential": 2}
    assert pairs["ratio_low"].to_dict() == {"dense, pipelined": 1, "accelerate, sequential": 1}
    assert pairs["byte_limit"]["dense, pipelined"] == pytest.approx(160 / 90)
    assert pd.isna(pairs["byte_limit"]["accelerate, sequential"])
    assert pairs["fault"].tolist() == ["", ""]
    for dense, fault in (
        ([2.5, 2.5, 2.5], "above the byte limit 1.78"),
        ([1.85, 1.9, 1.95], "above the byte limit 1.78"),
        ([1.6, 1.9, 2.2], ""),
    ):
        assert pairs_table(turns(dense=dense, endor=[1.0] * 3))["fault"].tolist() == [fault], dense
    for read, fault in ((0.96, False), (0.9, True), (1.1, True)):  # a layer is a twentieth of what 4 tokens read
        pairs = pairs_table(turns(read, dense=[1.7], endor=[1.0]))
        assert pairs["read_share_ours"].iloc[0] == pytest.approx(read, abs=0.01)
        assert (pairs["fault"].iloc[0] != "") == fault, read


def test_a_gain_by_overlap_by_hand():
    """Six seconds one stage after the other, four with a pipeline: 1.5 times as fast, and bytes set no limit."""
    spans = pd.concat([turns(endor=[6.0, 3.0]).assign(policy="sequential"), turns(endor=[4.0, 2.0])])
    (row,) = pairs_table(spans).to_dict("records")
    assert (row["ours"], row["other"], row["ratio"]) == ("endor, pipelined", "endor, sequential", 1.5)
    assert pd.isna(row["byte_limit"])
    gains = BOOK.overlap_gains(pairs_table(pd.concat([spans, turns(dense=[8.0, 4.0])])))
    assert gains[["method", "overlap_speedup"]].to_numpy().tolist() == [["endor", 1.5]]  # dense ran by one policy alone
