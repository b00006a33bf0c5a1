import importlib.metadata
import json
from dataclasses import asdict
from functools import partial

import pandas as pd
import pytest

from tests.measure.test_operations import MACHINE
from tests.models.test_twins import TOYS
from toolkit import paths
from toolkit.errors import UserError
from toolkit.machines.machine import Links, Memory, Profile, Source, Storage
from toolkit.measure import end_to_end, repetitions
from toolkit.measure.end_to_end import GOALS, decoding_pays, default_ways, goal_ratios, goals_table, pass_measurements
from toolkit.models import shapes
from toolkit.models.workload import Workload
from toolkit.policies.ways import Way
from toolkit.simulation.cost_model import with_rates
from toolkit.timeline.tables import LABELS

RATED = with_rates(MACHINE, "dram", {"endor": 10.0, "zstd": 1.0}, {"dense": 20.0, "endor": 9.0})
METHODS = ("dense", "endor", "endor_packed")


@pytest.fixture(scope="module", autouse=True)
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "cache_dir", lambda: folder)
        patch.setitem(shapes.SHAPES, "toy-opt", TOYS["toy-opt"])
        patch.setattr(end_to_end, "this_machine", lambda *arguments: RATED)
        patch.setattr(repetitions, "describe", lambda: {"cpu": "toy"})
        yield


@pytest.fixture(scope="module")
def table(toy):
    return pass_measurements("toy-opt", 4, repetitions=2)


def test_labels_tell_every_row_from_the_others(table):
    labels = [name for name in LABELS if name in table]
    assert set(LABELS) - set(labels) == {"placement"}
    assert not table.duplicated(labels).any()
    assert table[labels].notna().all(axis=None)
    measured = table[table["evidence"] == "measured"]
    found = {tuple(name) for name in measured[["method", "policy", "mapping"]].drop_duplicates().to_numpy()}
    assert found == {(way.method, way.policy, mapping) for way, mapping in default_ways(METHODS)}


def test_accelerate_is_measured_only_and_the_rest_is_modelled_as_well(table):
    kinds = table.groupby("method")["evidence"].unique().map(set).to_dict()
    assert kinds == {"accelerate": {"measured"}, **{name: {"measured", "modelled"} for name in METHODS}}
    ratios = table[(table["evidence"] == "modelled") & (table["stage"] == "total")]["modelled_over_measured"]
    assert (ratios > 0).all()
    assert table[table["evidence"] == "measured"]["modelled_over_measured"].isna().all()


def test_speed_ups_are_over_dense_weights_on_the_same_map_by_the_same_policy(table):
    total = table[(table["stage"] == "total") & (table["evidence"] == "measured")]
    rows = total.set_index(["method", "policy", "mapping"])
    seconds, speedup = rows["seconds"], rows["speedup"]
    assert not seconds.index.has_duplicates
    for method, policy, mapping in rows.index:
        base = "storage" if mapping == "storage" else "published"
        expected = seconds["dense", policy, base] / seconds[method, policy, mapping]
        assert speedup[method, policy, mapping] == pytest.approx(expected)
    assert (total["low_s"] <= total["seconds"]).all()
    assert (total["seconds"] <= total["high_s"]).all()


def test_the_model_counts_layers_where_the_map_has_them(table):
    """By hand: 4 layers of 229,376 B dense, 0.5625 of that packed; the disk gives 3 GB/s."""
    modelled = table[(table["evidence"] == "modelled") & (table["stage"] == "read")]
    seconds = modelled.set_index(["method", "policy", "mapping"])["seconds"]
    assert seconds["dense", "sequential", "storage"] == pytest.approx(4 * 229_376 / 3e9)
    assert seconds["dense", "sequential", "published"] == pytest.approx(3 * 229_376 / 3e9)
    assert seconds["endor", "pipelined", "storage"] == pytest.approx(4 * 0.5625 * 229_376 / 3e9, rel=0.1)  # and offsets


def test_what_was_measured_is_found_again_and_the_goals_are_made_from_it(table, monkeypatch):
    monkeypatch.setattr(end_to_end, "pass_spans", None)  # measuring again would fail
    pd.testing.assert_frame_equal(pass_measurements("toy-opt", 4, repetitions=2), table)
    goals = goal_ratios("toy-opt", 4, repetitions=2)
    assert goals["wanted"].tolist() == [*GOALS.values()]
    assert (goals["met"] == (goals["ratio"] >= goals["wanted"])).all()


def test_other_contestants_or_versions_are_measured_again(table, monkeypatch):
    keys = []
    monkeypatch.setattr(repetitions, "cached_table", lambda kind, key, *rest: keys.append(key))
    spans = partial(end_to_end._spans, Workload("toy-opt"), 4, METHODS, 2, False)
    spans()
    with monkeypatch.context() as patch:
        patch.setattr(end_to_end, "default_ways", lambda methods: [(Way("dense", device="cpu"), "storage")])
        spans()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} of tomorrow")
    spans()
    assert len({json.dumps(key) for key in keys}) == 3
    assert keys[1]["ways"] == [[asdict(Way("dense", device="cpu")), "storage"]]
    assert {"torch", "numba"} <= keys[2]["versions"].keys()
    assert keys[2]["versions"]["numba"] == "numba of tomorrow"


def test_rows_say_when_they_were_measured(table):
    measured = table["evidence"] == "measured"
    moments = pd.to_datetime(table[measured]["measured_at"])
    assert moments.nunique() == 1
    assert abs(pd.Timestamp.now("UTC") - moments.iloc[0]) < pd.Timedelta(hours=1)
    assert table[~measured]["measured_at"].isna().all()


def turns(**seconds: list[float]) -> pd.DataFrame:
    """Spans of passes that take these seconds, turn by turn."""
    rows = [
        {"method": method, "policy": "sequential" if method == "accelerate" else "pipelined", "repetition": number}
        | {"start_s": 0.0, "end_s": end_s}
        for method, ends in seconds.items()
        for number, end_s in enumerate(ends, 1)
    ]
    shared = {"mapping": "storage", "stage": "read", "op": "fc1", "tier": "storage", "nbytes": 1, "layer": 0}
    return pd.DataFrame(rows).assign(**shared)


def test_goals_by_hand():
    goals = goals_table(turns(dense=[2, 4, 3], endor=[1, 4, 1.5], accelerate=[6, 4, 3.0])).set_index("other")
    assert goals["ratio"].to_dict() == {"dense, pipelined": 2, "accelerate, sequential": 2}
    assert goals["low"].to_dict() == {"dense, pipelined": 1.5, "accelerate, sequential": 1.5}
    assert goals["met"].tolist() == [True, False]


def unpacked(decode_s: float, compute_s: float) -> pd.DataFrame:
    """A measured pass over 24 dense GB, half of it read at 3 GB/s: in 4 s."""
    seconds = {"read": 4.0, "decode": decode_s, "compute": compute_s}
    stages = pd.DataFrame({"stage": [*seconds], "seconds": [*seconds.values()], "nbytes": [12e9, 24e9, 24e9]})
    labels = {"method": "endor", "policy": "sequential", "mapping": "storage", "evidence": "measured"}
    return stages.assign(gb_s=stages["nbytes"] / 1e9 / stages["seconds"], **labels)


def theirs(decode_gb_s: float) -> Profile:
    dram = Memory("cpu", 1e10, 50.0, decode_gb_s={"endor": decode_gb_s})
    sources = {"dram.decode_gb_s.endor": Source("assumed", "a guess")}
    return Profile("theirs", "toy", None, Storage("disk", 1e12, 2.0), dram, None, Links(2.0), sources=sources)


def test_decoding_pays_by_hand():
    """Packed bytes are half of the dense ones: a disk of 3 GB/s asks for 6 GB/s either way."""
    found = decoding_pays(unpacked(decode_s=3.0, compute_s=0.75), theirs(decode_gb_s=3.0))
    assert found.loc["this-machine"].to_dict() == {
        "decode_gb_s": 8,
        "cpu_gb_s": 6.4,
        "read_gb_s": 3,
        "pays_sequential_gb_s": 6,
        "pays_pipelined_gb_s": 6,
        "pays": True,
        "hides": True,
        "basis": "measured",
    }
    assert found.loc["theirs", ["cpu_gb_s", "pays_sequential_gb_s"]].tolist() == [3, 4]
    assert found.loc["theirs", ["pays", "hides", "basis"]].tolist() == [False, False, "assumed"]


def test_decoding_hides_only_together_with_the_product():
    """Both run on the same cores: 3 s and 2 s are longer than a read of 4 s."""
    found = decoding_pays(unpacked(decode_s=3.0, compute_s=2.0), theirs(decode_gb_s=5.0))
    assert found["pays"].tolist() == [True, True]
    assert found["hides"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt-5", 4), "unknown twin model"),
        (("toy-opt", 4, ["gzip"]), "unknown method 'gzip'"),
        (("toy-opt", 0), "layers=0"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        pass_measurements(*arguments)


def test_no_repetition_is_refused():
    with pytest.raises(UserError, match="repetitions=0"):
        pass_measurements("toy-opt", 4, repetitions=0)
