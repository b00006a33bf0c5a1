from dataclasses import replace
from itertools import product

import pandas as pd
import pytest

from toolkit import paths
from toolkit.machines.machine import Links, Memory, Profile, Storage
from toolkit.measure import turns
from toolkit.models import shapes
from toolkit.models.workload import Workload
from toolkit.papers.endor import latency, rates
from toolkit.papers.endor.cost_model import with_rates

TOY = {"fc1": (96, 64), "fc2": (64, 96)}
MACHINE = Profile("this-machine", "toy", None, Storage("disk", 1e12, 2.0), Memory("cpu", 1e10, 20.0), None, Links(3.0))


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setitem(shapes.SHAPES, "toy", TOY)
    monkeypatch.setattr(rates, "RATES_MODEL", "toy")
    monkeypatch.setattr(rates, "RATES_PARTS", (1, 4))
    monkeypatch.setattr(rates, "probe", lambda: MACHINE)
    monkeypatch.setattr(turns, "describe", lambda: {"cpu": "toy"})


def test_operations_are_measured_and_modelled_alike(tmp_path):
    both = latency.operation_measurements(Workload("toy"), ["fc1"], repetitions=3, accelerate=True)
    accelerated = both[both["method"] == "accelerate"]
    assert set(accelerated["evidence"]) == {"measured"}
    assert set(accelerated["mode"]) == {"buffered"}
    table = latency.operation_measurements(Workload("toy"), ["fc1", "fc2"], repetitions=3)
    assert [folder.name for folder in tmp_path.iterdir()] == ["measured"]  # no weights are left
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


def spans_that_take(takes):
    """Spans as `measured_spans` gives them; `takes` has method, stage, GB of the whole and seconds of a GB's part."""
    rows = []
    for repetition, factor in enumerate((1.0, 0.5, 4.0), 1):
        for (method, stage, gb, seconds), part in product(takes, (1, 2, 4)):
            labels = {"method": method, "stage": stage, "op": f"fc1/{part}", "repetition": repetition}
            rows.append(labels | {"nbytes": gb * 1e9 / part, "seconds": seconds(gb / part) * factor})
    return pd.DataFrame(rows)


def line(fixed_s, s_per_gb):
    return lambda gb: fixed_s + s_per_gb * gb


def test_reads_are_a_line_and_the_rest_curves_over_the_sizes_of_another_matrix(monkeypatch):
    takes = [
        *(
            ("dense", "read", 8, line(1, 1 / 4)),
            ("endor", "read", 4, line(1, 1 / 4)),
            ("zstd", "read", 5, line(1, 1 / 4)),
        ),
        *(("endor", "decode", 8, line(2, 1 / 8)), ("zstd", "decode", 8, line(3, 1))),
        *((method, "compute", 8, line(0, 1 / 2)) for method in ("dense", "endor", "zstd")),
        ("endor_packed", "compute", 4, line(5, 1)),
    ]
    monkeypatch.setattr(rates, "measured_spans", lambda *arguments, **named: spans_that_take(takes))
    machine = rates.this_machine()
    assert machine.links.storage_to_dram_gb_s == pytest.approx(4.0)
    assert machine.links.storage_to_dram_fixed_s == pytest.approx(1.0)
    assert machine.dram.bandwidth_gb_s == 20.0
    assert [machine.dram.decode_s("endor", gb * 1e9) for gb in (2, 3, 8)] == pytest.approx([2.25, 2.375, 3])
    assert [machine.dram.decode_s("zstd", gb * 1e9) for gb in (2, 3, 8)] == pytest.approx([5, 6, 11])
    assert [machine.dram.matvec_s("dense", gb * 1e9) for gb in (2, 4, 6)] == pytest.approx([1, 2, 3])
    assert [machine.dram.matvec_s("endor", gb * 1e9) for gb in (1, 2, 3)] == pytest.approx([6, 7, 8])


def test_the_model_is_held_against_the_median_of_each_stage(monkeypatch):
    workload, machine = (
        Workload("toy"),
        with_rates(replace(MACHINE, links=Links(1.0)), "dram", matvec_gb_s={"dense": 1.0}),
    )
    nbytes = 2 * 96 * 64
    shared = {"op": "fc1", "layer": 0, "method": "dense", "placement": "storage", "policy": "sequential"}
    shared |= {"path": "host", "device": "cpu", "token": 0, "tokens": 1, "nbytes": nbytes, "stored_bytes": nbytes}
    shared |= {"memory_bytes": float("inf"), "mode": "direct", "measured_at": "now", "disturbed": False}
    rows = []
    for repetition, (read_s, compute_s) in enumerate([(1, 30), (2, 4), (20, 3)]):  # totals 31, 6, 23
        for stage, tier, start_s, end_s in (
            ("read", "storage", 0.0, read_s),
            ("compute", "dram", read_s, read_s + compute_s),
        ):
            rows.append({"repetition": repetition, "stage": stage, "tier": tier, "start_s": start_s, "end_s": end_s})
    monkeypatch.setattr(latency, "this_machine", lambda *arguments: machine)
    monkeypatch.setattr(latency, "measured_spans", lambda *arguments, **named: pd.DataFrame(rows).assign(**shared))
    table = latency.operation_measurements(workload, ["fc1"], ["dense"]).set_index(["evidence", "stage"])
    measured, modelled = table.loc["measured"], table.loc["modelled"]
    assert set(measured["measured_at"]) == {"now"}
    assert modelled["measured_at"].isna().all()
    assert measured["seconds"].to_dict() == {"read": 2, "compute": 4, "transfer": 2, "total": 23}
    ratios = modelled["modelled_over_measured"]
    expected = [nbytes / 1e9 / seconds for seconds in (2, 4, 2)]
    assert ratios[["read", "compute", "transfer"]].tolist() == pytest.approx(expected)
    assert ratios["total"] == pytest.approx(2 * nbytes / 1e9 / 23)
