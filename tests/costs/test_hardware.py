import copy
import datetime
import math
import re

import pandas as pd
import pytest
import yaml

from toolkit import paths
from toolkit.costs.hardware import profile, profiles
from toolkit.costs.machine import BASES, EVIDENCE, Memory, Software, Storage
from toolkit.errors import UserError
from toolkit.evidence import run as results

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


def without(path: str) -> dict:
    record = copy.deepcopy(RECORD)
    *parents, last = path.split(".")
    inner = record
    for key in parents:
        inner = inner[key]
    del inner[last]
    return record


def replaced(path: str, value: object) -> dict:
    record = copy.deepcopy(RECORD)
    *parents, last = path.split(".")
    inner = record
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return record


def test_numbers_come_in_the_units_of_their_names(write):
    write(RECORD)
    toy = profile("toy")
    assert toy.storage == Storage("disk", 2e12, 2.0)
    assert (toy.device.capacity_bytes, toy.device.bandwidth_gb_s, toy.device.tflop_s["fp32"]) == (2 * 2**30, 2.0, 0.002)
    assert (toy.dram, toy.near_data, toy.links.dram_to_device_gb_s, toy.unified) == (None, None, None, False)
    source = toy.sources["storage.bandwidth_gb_s"]
    assert (source.basis, source.text, source.low, source.high) == ("paper", "table 1 of a paper", 1.0, 4.0)
    assert toy.value("device.tflop_s.fp32") == 0.002


def test_a_number_names_the_claims_that_it_was_taken_from(write):
    write(replaced("storage.bandwidth.claims", ["fig01-disk"]))
    assert profile("toy").sources["storage.bandwidth_gb_s"].claims == ("fig01-disk",)
    assert profile("toy").sources["storage.capacity_bytes"].claims == ()
    write(replaced("storage.bandwidth.claims", "fig01-disk"))
    with pytest.raises(UserError, match=r"storage\.bandwidth\.claims: 'fig01-disk': Input should be a valid list"):
        profiles()


def test_rates_of_decoding_and_the_softwares_part_are_read(write):
    software = {"name": "a library", "layer": NUMBER | {"unit": "ms"}}
    write(replaced("device.decode", {"endor": RATE | {"unit": "GiB/s"}}) | {"software": software})
    toy = profile("toy")
    assert toy.device.decode_gb_s == {"endor": 2 * 2**30 / 1e9}
    assert toy.software == Software("a library", 0.002)
    assert toy.value("device.decode_gb_s.endor") == 2 * 2**30 / 1e9
    assert "software.layer_s" in toy.sources


def test_fixed_times_are_read_and_none_if_not_given(write):
    link = {"storage_to_dram": RATE, "storage_to_dram_fixed": NUMBER | {"unit": "us"}}
    device = RECORD["device"] | {"decode_fixed": {"endor": NUMBER | {"unit": "ms"}}}
    write(RECORD | {"links": link, "device": device})
    toy = profile("toy")
    assert (toy.links.storage_to_dram_fixed_s, toy.links.dram_to_device_fixed_s) == (2e-6, 0)
    assert (toy.device.decode_fixed_s, toy.device.matvec_fixed_s) == ({"endor": 0.002}, {})
    assert toy.value("device.decode_fixed_s.endor") == 0.002
    assert toy.table().set_index("quantity")["value"]["storage_to_dram_fixed_s"] == 2e-6


def test_the_table_has_a_row_a_number(write):
    write(RECORD)
    table = profile("toy").table()
    assert table["quantity"].tolist() == ["capacity_bytes", "bandwidth_gb_s"] * 2 + ["tflop_s.fp32"]
    assert table["value"].tolist() == [2e12, 2.0, 2 * 2**30, 2.0, 0.002]
    assert table["name"].tolist() == ["disk", "disk", "gpu", "gpu", "gpu"]
    assert set(table["basis"]) == {"paper"}
    assert set(table["evidence"]) == {"published"}


def test_every_basis_is_a_kind_of_evidence_and_only_stated_numbers_are_published():
    assert EVIDENCE.keys() == BASES.keys()
    assert set(EVIDENCE.values()) <= set(results.EVIDENCE)
    table = profile("endor-rtx4080").table().set_index(["part", "quantity"])["evidence"]
    assert table["device", "bandwidth_gb_s"] == "published"
    assert table["dram", "bandwidth_gb_s"] == table["links", "storage_to_dram_gb_s"] == "modelled"


def test_a_bad_record_is_named_with_its_file(write):
    cases = [
        (without("title"), ["toy.yaml", "record toy: title", "Field required"]),
        (without("id"), ["toy.yaml", "record number 1: id", "Field required"]),
        (without("storage.bandwidth.source"), ["record toy: storage.bandwidth.source", "Field required"]),
        (replaced("storage.bandwidth.unit", "TB"), ["storage.bandwidth.unit: 'TB': Input should be 'GB/s' or 'GiB/s'"]),
        (replaced("device.decode", {"gzip": RATE}), ["record toy: device.decode.gzip", "not permitted"]),
        (replaced("storage.bandwidth.basis", "measured"), ["storage.bandwidth.basis: 'measured': Input should be"]),
        (replaced("storage.bandwidth.value", 0), ["storage.bandwidth.value", "0"]),
        (replaced("storage.bandwidth.value", "2"), ["storage.bandwidth.value: '2': Input should be a valid number"]),
        (replaced("storage.bandwidth.value", math.nan), ["storage.bandwidth.value: nan: Input should be a finite"]),
        (
            replaced("title", datetime.date(2026, 1, 2)),
            ["toy.yaml", "'2026-01-02' is read as a date: put it in quotes"],
        ),
        (replaced("storage", {1: 2}), ["toy.yaml", "a key 1: expected text"]),
    ]
    for record, words in cases:
        write(record)
        with pytest.raises(UserError) as caught:
            profiles()
        message = str(caught.value)
        assert "\n" not in message
        assert all(word in message for word in words), message


def test_an_id_used_twice_is_refused_across_files(write):
    write(RECORD)
    write(RECORD, name="zoo.yaml")
    with pytest.raises(UserError, match=r"zoo\.yaml: record toy: the id is used twice"):
        profiles()


def test_a_file_that_is_no_yaml_is_named(write, tmp_path):
    write(RECORD)
    (tmp_path / "data" / "hardware" / "toy.yaml").write_text("- {id: [")
    with pytest.raises(UserError, match=r"toy\.yaml: cannot be read"):
        profiles()


def test_an_unknown_profile_lists_the_known():
    with pytest.raises(UserError, match=r"unknown hardware profile 'endor'; choose from: .*endor-rtx4080"):
        profile("endor")


def test_every_paper_has_its_machines():
    known = profiles()
    assert {machine.paper for machine in known.values()} == {"endor", "flash", "spqr", "hermes", "corm", None}
    assert {"endor-rtx4080", "flash-m1-max", "flash-m2-ultra", "flash-rtx4090", "spqr-a100", "h200"} <= set(known)
    assert {"spqr-rtx4060-mobile", "hermes-rtx4090", "hermes-t4", "hermes-rtx3090", "corm-rtx3090ti"} <= set(known)


@pytest.mark.parametrize("machine", profiles().values(), ids=lambda machine: machine.id)
def test_every_number_is_plausible_and_has_its_source(machine):
    table = machine.table()
    assert len(table) >= 4
    for row in table.itertuples():
        low, high = PLAUSIBLE[f"{row.part}.{row.quantity}"]
        assert low <= row.value <= high, row
        assert row.basis in BASES
        assert len(row.source) >= 10
        if row.basis == "derived":
            assert re.search(r"\d.*[×/-]|16 × 16", row.source), row  # shows its arithmetic
        if not pd.isna(row.low):
            assert row.low <= row.value <= row.high, row


@pytest.mark.parametrize("machine", profiles().values(), ids=lambda machine: machine.id)
def test_tiers_get_faster_towards_the_device(machine):
    speeds = [tier.bandwidth_gb_s for tier in (machine.storage, machine.dram, machine.device) if tier]
    assert speeds == sorted(speeds)
    if machine.storage and machine.links.storage_to_dram_gb_s:
        assert machine.links.storage_to_dram_gb_s <= machine.storage.bandwidth_gb_s
    if machine.links.dram_to_device_gb_s and machine.dram:
        assert machine.links.dram_to_device_gb_s <= machine.dram.bandwidth_gb_s
    assert machine.unified == machine.id.startswith(("flash-m", "phone"))


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


def test_read_bandwidth_rises_with_chunk_and_threads_to_the_limit():
    disk = Storage("disk", 1e12, bandwidth_gb_s=3.0, latency_s=80e-6, request_s=2e-6)
    by_chunk = [disk.read_gb_s(4096 << step, 4) for step in range(12)]
    by_threads = [disk.read_gb_s(32768, 1 << step) for step in range(12)]
    assert by_chunk == sorted(by_chunk)
    assert by_threads == sorted(by_threads)
    assert by_chunk[-1] == pytest.approx(3.0, rel=0.02)
    assert by_threads[-1] < 3.0


def test_a_disk_of_unknown_latency_is_not_modelled():
    with pytest.raises(UserError, match="no latency for P31"):
        Storage("P31", 2e12, 3.5).read_gb_s(4096, 1)


def test_the_roofline_has_its_slope_and_its_roof():
    gpu = Memory("gpu", 1e10, bandwidth_gb_s=1000, tflop_s={"fp16": 100})
    assert gpu.attainable_tflop_s(1, "fp16") == 1
    assert gpu.attainable_tflop_s(1000, "fp16") == 100
    with pytest.raises(UserError, match="unknown dtype of gpu 'fp32'; choose from: fp16"):
        gpu.attainable_tflop_s(1, "fp32")
