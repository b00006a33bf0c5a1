import errno
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from toolkit import memory_limits
from toolkit.errors import UserError
from toolkit.machines import disk, memory, probe
from toolkit.machines.fit import non_negative
from toolkit.machines.machine import Storage
from toolkit.machines.probe import KIB, MIB, ProbeSettings, fit_latency, measurements

TINY = ProbeSettings(MIB, (4 * KIB, 64 * KIB), (1, 2), read_s=0.005, memory_bytes=MIB, repetitions=2)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "probe"


@pytest.fixture
def quick(monkeypatch):
    """Memory, copies and compute without the work: the first repetition is ten times too good, to be left out."""
    calls = []

    def values(value):
        def measure(*arguments, **named):
            calls.append(arguments)
            return [10 * value, value, value / 2]

        return measure

    monkeypatch.setattr(memory, "read_gb_s", values(20.0))
    monkeypatch.setattr(memory, "gemm_tflop_s", values(0.1))
    monkeypatch.setattr(memory, "transfer_gb_s", values(25.0))
    return calls


def kept(cache) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir()) if cache.is_dir() else []


def test_a_real_probe_gives_a_whole_profile():
    machine = probe.probe(settings=TINY)
    assert (machine.id, machine.paper, machine.near_data) == ("this-machine", None, None)
    assert machine.storage.bandwidth_gb_s > 0
    assert machine.links.storage_to_dram_gb_s == machine.storage.bandwidth_gb_s
    assert machine.storage.read_gb_s(4096, 1) > 0
    assert machine.dram.capacity_bytes == memory_limits.total_bytes()
    assert set(machine.dram.tflop_s) == {"fp32", "bf16"}
    table = machine.table()
    assert set(table["basis"]) == {"measured"}
    assert (table["value"] >= 0).all()
    assert (table["source"].str.len() > 10).all()


def test_the_first_repetition_is_left_out_of_the_profile(quick, monkeypatch):
    speeds = iter([100.0] * 6 + [1.0] * 6 + [3.0] * 6)  # six cells a repetition
    monkeypatch.setattr(disk, "read", lambda *_, **__: disk.Reading(1, next(speeds)))
    machine = probe.probe(settings=replace(TINY, repetitions=3))
    assert machine.storage.bandwidth_gb_s == 2.0  # the median of 1 and 3
    assert machine.dram.bandwidth_gb_s == 20.0  # the best of 20 and 10


def test_it_is_measured_once_and_again_when_asked(quick, cache, monkeypatch):
    first = measurements(settings=TINY)
    count = len(quick)
    pd.testing.assert_frame_equal(measurements(settings=TINY), first)
    assert len(quick) == count
    fresh = measurements(fresh=True, settings=TINY)
    assert len(quick) == 2 * count
    assert not fresh[fresh["part"] == "storage"]["value"].equals(first[first["part"] == "storage"]["value"])
    pd.testing.assert_frame_equal(measurements(settings=TINY), fresh)
    assert len(kept(cache)) == 1
    measurements(settings=replace(TINY, threads=(1,)))
    monkeypatch.setattr(probe, "cpu_name", lambda: "another, 64 cores")
    measurements(settings=TINY)
    assert len(kept(cache)) == 3, "other settings and another machine are measurements of their own"


def test_an_interruption_keeps_nothing_and_leaves_nothing(quick, cache, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(disk, "read", fail)
    with pytest.raises(UserError, match="the disk cannot"):
        measurements(settings=TINY, folder=tmp_path)
    assert kept(cache) == []
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_with_a_gpu_the_profile_has_the_device_and_the_way_to_it(quick, monkeypatch):
    with_gpu = probe.describe() | {"gpu": "H200", "device_bytes": 150e9}
    monkeypatch.setattr(probe, "describe", lambda folder=None: with_gpu)
    machine = probe.probe(settings=TINY)
    assert (machine.device.name, machine.device.capacity_bytes) == ("H200", 150e9)
    assert set(machine.device.tflop_s) == {"fp32", "fp16", "bf16"}
    assert machine.links.dram_to_device_gb_s == 25.0
    assert machine.title.endswith("H200")
    assert {call[2:] for call in quick if len(call) == 4} >= {("cpu", "cuda"), ("cuda", "cpu")}


def test_the_command_line_names_a_folder_that_is_not_there(capsys, tmp_path):
    assert probe.main(["--folder", str(tmp_path / "none")]) == 2
    assert f"error: no folder {tmp_path / 'none'}" in capsys.readouterr().err


def test_the_fit_finds_what_made_the_numbers():
    true = Storage("disk", 1e12, 3.0, latency_s=80e-6, request_s=5e-6)
    fitted, error = fit_latency(Storage("disk", 1e12, 3.0), cells(true))
    assert fitted.latency_s == pytest.approx(80e-6)
    assert fitted.request_s == pytest.approx(5e-6)
    assert error < 1e-9


def cells(storage: Storage) -> pd.DataFrame:
    rows = [(chunk, threads) for chunk in (4 * KIB, 32 * KIB, MIB) for threads in (1, 4, 32)]
    table = pd.DataFrame(rows, columns=["chunk_bytes", "threads"])
    return table.assign(value=[storage.read_gb_s(chunk, threads) for chunk, threads in rows])


def test_no_point_of_a_grid_fits_better():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        terms, target = rng.random((5, 2)), rng.standard_normal(5)
        found = np.array(non_negative(terms, target))
        assert found.min() >= 0
        squares = ((terms @ found - target) ** 2).sum()
        grid = product(np.linspace(0, 3, 61), repeat=2)
        assert squares <= min(((terms @ tried - target) ** 2).sum() for tried in grid) + 1e-12
