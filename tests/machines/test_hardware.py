import re

import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from toolkit import paths
from toolkit.errors import UserError
from toolkit.machines.hardware import profile, profiles
from toolkit.machines.machine import Curve, Memory, Storage

NUMBER = {"value": 2, "unit": "TB", "basis": "paper", "source": "table 1 of a paper"}
RATE = NUMBER | {"unit": "GB/s"}
RECORD = {
    "id": "toy",
    "title": "a toy",
    "paper": None,
    "storage": {"name": "disk", "capacity": NUMBER, "bandwidth": RATE | {"range": [1, 4]}},
    "device": {
        "name": "gpu",
        "capacity": NUMBER | {"unit": "GiB"},
        "bandwidth": RATE,
        "compute": {"fp32": RATE | {"unit": "GFLOP/s"}},
    },
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "hardware"
    folder.mkdir(parents=True)
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    return lambda *records, name="toy.yaml": (folder / name).write_text(yaml.safe_dump(list(records)))


def test_numbers_come_in_the_units_of_their_names(write):
    write(RECORD)
    toy = profile("toy")
    assert toy.storage == Storage("disk", 2e12, 2.0)
    assert (toy.device.capacity_bytes, toy.device.bandwidth_gb_s, toy.device.tflop_s["fp32"]) == (2 * 2**30, 2.0, 0.002)
    assert (toy.dram, toy.near_data, toy.links.dram_to_device_gb_s, toy.unified) == (None, None, None, False)
    source = toy.sources["storage.bandwidth_gb_s"]
    assert (source.basis, source.text, source.low, source.high) == ("paper", "table 1 of a paper", 1.0, 4.0)
    assert toy.value("device.tflop_s.fp32") == 0.002


def test_every_number_has_its_source():
    for machine in profiles().values():
        for row in machine.table().itertuples():
            assert row.value > 0, row
            assert len(row.source) >= 10, row
            if row.basis == "derived":
                assert re.search(r"\d.*[×/-]|16 × 16", row.source), row  # shows its arithmetic
            assert pd.isna(row.low) or row.low <= row.value <= row.high, row


def test_read_bandwidth_by_hand():
    disk = Storage("disk", 1e12, bandwidth_gb_s=1.0, latency_s=100e-6, request_s=6e-6)
    assert disk.read_gb_s(4000, 1) == pytest.approx(4000 / 110e-6 / 1e9)  # 100 waiting, 6 served, 4 transferred
    assert disk.read_gb_s(4000, 10) == pytest.approx(40000 / 200e-6 / 1e9)  # 100 waiting, ten times 10 in turn


def test_the_roofline_has_its_slope_and_its_roof():
    gpu = Memory("gpu", 1e10, bandwidth_gb_s=1000, tflop_s={"fp16": 100})
    assert gpu.attainable_tflop_s(1, "fp16") == 1
    assert gpu.attainable_tflop_s(1000, "fp16") == 100
    with pytest.raises(UserError, match="unknown dtype of gpu 'fp32'; choose from: fp16"):
        gpu.attainable_tflop_s(1, "fp32")


points = st.dictionaries(st.integers(1, 10**9), st.floats(1e-6, 10.0), min_size=1, max_size=8)


def test_between_below_and_beyond_the_sizes_by_hand():
    curve = Curve.through([4, 1, 2], [3.0, 1.0, 2.0])
    assert curve == Curve((1, 2, 4), (1, 2, 3))
    assert [curve.at(n) for n in (0.5, 1, 1.5, 2, 3, 4)] == pytest.approx([1, 1, 1.5, 2, 2.5, 3])
    assert curve.at(8) == pytest.approx(6)  # at the rate of the largest


def test_a_slow_spell_is_cut_to_the_time_of_a_larger_size():
    assert Curve.through([1, 2, 4, 8], [1.0, 9.0, 3.0, 5.0]).seconds == (1, 3, 3, 5)


@given(points, st.floats(0, 2e9), st.floats(0, 2e9))
def test_more_bytes_never_take_less_time(sizes, few, many):
    curve = Curve.through(list(sizes), list(sizes.values()))
    few, many = sorted((few, many))
    assert 0 < curve.at(few) <= curve.at(many) * (1 + 1e-12)


def test_a_product_takes_the_longer_of_bytes_and_multiplications():
    near = profile("hermes-rtx4090").near_data  # 40 GB/s, 48 · 10⁹ multiply-adds a second
    assert near.gemv_s(40e9, 1) == pytest.approx(1.0)
    assert near.gemv_s(1, 48e9) == pytest.approx(1.0)
    assert near.with_multipliers(64).gemv_s(1, 48e9) == pytest.approx(4.0)
    assert near.gemv_s([40e9, 80e9], [0, 0]).tolist() == pytest.approx([1.0, 2.0])
