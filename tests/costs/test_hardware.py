import re

import pandas as pd
import pytest
import yaml

from toolkit import paths
from toolkit.costs.hardware import profile, profiles
from toolkit.costs.machine import Memory, Storage
from toolkit.errors import UserError

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
# (lowest, highest) that such a number can be on a machine of these years
PLAUSIBLE = {
    "storage.capacity_bytes": (1e11, 2e13),
    "storage.bandwidth_gb_s": (1, 15),
    "storage.latency_s": (2e-5, 5e-4),
    "storage.request_s": (1e-7, 1e-4),
    "storage.thread_gb_s": (0.1, 10),
    "dram.capacity_bytes": (8e9, 4e12),
    "dram.bandwidth_gb_s": (20, 1000),
    "device.capacity_bytes": (4e9, 3e11),
    "device.bandwidth_gb_s": (50, 8000),
    "device.tflop_s.fp32": (5, 100),
    "device.tflop_s.fp16": (10, 2000),
    "device.tflop_s.bf16": (10, 1000),
    "device.tflop_s.int8": (50, 2000),
    "dram.decode_gb_s.endor": (1, 100),
    "dram.decode_gb_s.zstd": (0.2, 5),
    "device.decode_gb_s.endor": (20, 2000),
    "device.sm_ghz": (10, 500),
    "software.layer_s": (1e-5, 1e-1),
    "software.launch_s": (1e-6, 1e-4),
    "software.bandwidth_share": (0.3, 1),
    "software.word_cycles": (0.1, 100),
    "software.manage_gb_s": (1, 100),
    "dram.matvec_gb_s.dense": (5, 1000),
    "dram.matvec_gb_s.neurons": (5, 1000),
    "device.matvec_gb_s.dense": (20, 8000),
    "device.matvec_gb_s.neurons": (20, 8000),
    "links.storage_to_dram_gb_s": (0.5, 15),
    "links.dram_to_device_gb_s": (1, 70),
    "links.dram_to_device_fixed_s": (1e-6, 5e-3),
    "links.storage_to_device_gb_s": (0.5, 15),
    "near_data.dimms": (1, 32),
    "near_data.capacity_bytes": (4e9, 1.3e11),
    "near_data.bandwidth_gb_s": (10, 110),
    "near_data.tflop_s": (0.05, 10),
    "near_data.link_gb_s": (5, 100),
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


def test_every_number_is_plausible_and_has_its_source():
    for machine in profiles().values():
        for row in machine.table().itertuples():
            low, high = PLAUSIBLE[f"{row.part}.{row.quantity}"]
            assert low <= row.value <= high, row
            assert len(row.source) >= 10, row
            if row.basis == "derived":
                assert re.search(r"\d.*[×/-]|16 × 16", row.source), row  # shows its arithmetic
            assert pd.isna(row.low) or row.low <= row.value <= row.high, row


def test_a_bad_record_is_named_with_its_file(write):
    write(RECORD | {"storage": RECORD["storage"] | {"bandwidth": RATE | {"unit": "TB"}}})
    with pytest.raises(UserError, match=r"toy\.yaml: record toy: storage\.bandwidth\.unit: 'TB'"):
        profiles()
    write(RECORD, RECORD)
    with pytest.raises(UserError, match=r"toy\.yaml: record toy: the id is used twice"):
        profiles()


@pytest.mark.parametrize(
    ("layer_bytes", "on_gpu", "on_cpu", "on_ssd", "published_s"),
    [
        (2 * (4 * 9216**2 + 2 * 9216 * 36864), 5, 8, 51, 54),  # OPT-66B
        (
            2 * (2 * 8192**2 + 2 * 1024 * 8192 + 3 * 8192 * 28672),
            6,
            10,
            64,
            57,
        ),  # Llama2-70B, which nothing was fitted to
    ],
)
def test_endors_links_give_its_published_passes(layer_bytes, on_gpu, on_cpu, on_ssd, published_s):
    machine = profile("endor-rtx4080")
    up_s = layer_bytes / machine.links.dram_to_device_gb_s / 1e9
    read_s = layer_bytes / machine.links.storage_to_dram_gb_s / 1e9
    compute_s = layer_bytes / machine.device.bandwidth_gb_s / 1e9
    total_s = on_gpu * compute_s + on_cpu * up_s + on_ssd * (read_s + up_s)
    assert total_s == pytest.approx(published_s, rel=0.05)


def test_short_reads_of_the_m1_max_come_near_its_published_throughput():
    disk = profile("flash-m1-max").storage
    assert disk.read_gb_s(8 << 10, 32) == pytest.approx(1.25, rel=0.06)
    assert disk.read_gb_s(16 << 10, 32) == pytest.approx(2.25, rel=0.06)


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
