import pandas as pd
import pytest

from toolkit import paths, shapes
from toolkit.errors import UserError
from toolkit.offload import here
from toolkit.offload.passes import Case
from toolkit.simulation.endor import Workload
from toolkit.simulation.machine import Links, Memory, Profile, Storage

TOY = {"fc1": (96, 64), "fc2": (64, 96)}
MACHINE = Profile("this-machine", "toy", None, Storage("disk", 1e12, 2.0), Memory("cpu", 1e10, 20.0), None, Links(3.0))


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setitem(shapes.SHAPES, "toy", TOY)
    monkeypatch.setattr(here, "RATES_MODEL", "toy")
    monkeypatch.setattr(here, "probe", lambda: MACHINE)
    monkeypatch.setattr(here, "describe", lambda: {"cpu": "toy"})


@pytest.fixture
def measurements(monkeypatch):
    """How often something was measured."""
    count, really = [], here.timed_passes
    monkeypatch.setattr(here, "timed_passes", lambda *arguments: count.append(arguments) or really(*arguments))
    return count


def test_operations_are_measured_and_modelled_alike():
    table = here.operations_here(Workload("toy"), ["fc1", "fc2"], repetitions=3)
    measured, modelled = (table[table["evidence"] == kind] for kind in ("measured", "modelled"))
    labels = ["profile", "model", "op", "placement", "method", "path", "policy", "device", "stage"]
    assert set(measured[labels].itertuples(index=False)) == set(modelled[labels].itertuples(index=False))
    assert set(measured["mode"]) <= {"direct", "buffered"}
    assert measured["modelled_over_measured"].isna().all()
    ratios = modelled["seconds"].to_numpy() / measured["seconds"].to_numpy()
    assert len(ratios) == 2 * (4 + 5 + 5 + 4)
    key = [measured.set_index(labels)["seconds"], modelled.set_index(labels)]
    expected = key[1]["seconds"] / key[0].reindex(key[1].index)
    assert key[1]["modelled_over_measured"].to_numpy() == pytest.approx(expected.to_numpy())


def test_the_median_repetition_lies_between_the_least_and_the_most():
    table = here.operations_here(Workload("toy", "int8"), ["fc1"], repetitions=3)
    measured = table[table["evidence"] == "measured"]
    assert (measured["low_s"] <= measured["seconds"]).all()
    assert (measured["seconds"] <= measured["high_s"]).all()


def test_a_layer_in_both_tiers_and_read_ahead():
    table = here.layer_here(Workload("toy"), repetitions=1, policies=["sequential", "pipelined"])
    measured = table[(table["evidence"] == "measured") & (table["stage"] == "total")]
    found = set(measured[["placement", "policy", "method"]].itertuples(index=False, name=None))
    methods = ("dense", "endor", "endor_packed")
    kinds = [("storage", "sequential"), ("storage", "pipelined"), ("dram", "sequential")]
    assert found == {(*kind, method) for kind in kinds for method in methods}
    spans = here.layer_spans(Workload("toy"), Case("endor"), repetitions=1)
    assert spans["op"].unique().tolist() == ["fc1", "fc2"]
    assert spans["stage"].tolist() == ["read", "decode", "compute"] * 2
    whole = measured.set_index(["placement", "policy", "method"])["seconds"]["storage", "sequential", "endor"]
    assert spans["end_s"].max() - spans["start_s"].min() == pytest.approx(whole)


def test_what_was_measured_is_kept_until_fresh_is_asked_for(measurements):
    first = here.operations_here(Workload("toy"), ["fc1"], repetitions=1)
    assert len(measurements) == 2  # the operation, and the rates
    pd.testing.assert_frame_equal(
        here.operations_here(Workload("toy"), ["fc1"], ["dense"], repetitions=1),
        (first[first["method"] == "dense"].reset_index(drop=True)),
    )
    assert len(measurements) == 2
    fresh = here.operations_here(Workload("toy"), ["fc1"], repetitions=1, fresh=True)
    assert len(measurements) == 4
    assert not fresh["seconds"].equals(first["seconds"])
    pd.testing.assert_frame_equal(here.operations_here(Workload("toy"), ["fc1"], repetitions=1), fresh)


def test_rates_are_the_medians_over_another_matrix(monkeypatch):
    rows = []
    for repetition, factor in enumerate([100.0, 1.0, 2.0, 4.0]):  # the first one does not count
        for method, stage, nbytes, seconds in [
            ("dense", "read", 8e9, 2),
            ("endor", "read", 4e9, 1),
            ("dense", "compute", 8e9, 1),
            ("endor", "decode", 8e9, 4),
            ("endor", "compute", 8e9, 3),
            ("endor_packed", "compute", 4e9, 1),
            ("zstd", "decode", 8e9, 16),
            ("zstd", "compute", 8e9, 5),
        ]:
            times = {"start_s": 1.0, "end_s": 1.0 + seconds * factor}
            rows.append({"method": method, "stage": stage, "nbytes": nbytes, "repetition": repetition} | times)
    monkeypatch.setattr(here, "_spans", lambda *arguments: pd.DataFrame(rows))
    machine = here.machine_here()
    assert machine.dram.decode_gb_s == pytest.approx({"endor": 1.0, "zstd": 0.25})
    assert machine.dram.matvec_gb_s == pytest.approx({"dense": 4.0, "endor": 2.0})
    assert machine.links.storage_to_dram_gb_s == 2.0
    assert machine.dram.bandwidth_gb_s == 20.0


def test_unknown_names_are_refused_before_anything_is_measured(measurements):
    with pytest.raises(UserError, match="unknown method for layers 'zstd'"):
        here.layer_here(Workload("toy"), ["zstd"])
    with pytest.raises(UserError, match="unknown layer of toy 'fc3'"):
        here.operations_here(Workload("toy"), ["fc3"])
    assert measurements == []
    with pytest.raises(UserError, match="repetitions=0"):
        here.operations_here(Workload("toy"), ["fc1"], repetitions=0)
