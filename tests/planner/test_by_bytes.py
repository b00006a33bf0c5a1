"""Bytes that ways move, and limits by bytes on machines with round numbers."""

from dataclasses import replace

import pytest

from toolkit.__main__ import main
from toolkit.errors import UserError
from toolkit.machines.hardware import profile
from toolkit.machines.machine import Links, Memory, Profile
from toolkit.models.architectures import ARCHITECTURES
from toolkit.planner import sizes
from toolkit.planner.by_bytes import bounds, limit_elsewhere, resized
from toolkit.planner.plan_table import WIDTH
from toolkit.planner.target import open_target
from toolkit.planner.ways import ways

GB = 10**9
SHAPE = ARCHITECTURES["llama2-7b"]
MACHINE = Profile(
    "round",
    "round numbers",
    None,
    dram=Memory("dram", 20 * GB, 50),
    device=Memory("gpu", 2 * GB + 2**30, 1000),
    links=Links(storage_to_dram_gb_s=2, dram_to_device_gb_s=10),
)


def way(name):
    return next(way for way in ways(experts=False) if way.name == name)


def test_what_the_gpu_does_not_hold_is_copied_for_each_token():
    found = limit_elsewhere(SHAPE, way("int8"), MACHINE)
    memory, used = sizes.footprint(SHAPE, way("int8")), sizes.token_bytes(SHAPE, way("int8"))
    assert (found.device, found.storage) == (pytest.approx(2 * GB / memory.whole_bytes), pytest.approx(0))
    assert found.seconds == pytest.approx((1 - 2 * GB / memory.whole_bytes) * used / 10 / GB)


def test_a_size_of_the_gpu_is_what_weights_may_take_of_it():
    """With next to nothing there, all weights are copied: none is multiplied by the GPU where it lies."""
    used = sizes.token_bytes(SHAPE, way("int8"))
    assert resized(MACHINE, device_bytes=2 * GB) == MACHINE
    found = limit_elsewhere(SHAPE, way("int8"), resized(MACHINE, device_bytes=1_000_000))
    assert (found.seconds, found.limit) == (pytest.approx(used / 10 / GB, rel=1e-3), "copies")
    assert limit_elsewhere(SHAPE, way("int8"), resized(MACHINE, device_bytes=0)).limit == "copies"


def test_llama_cpp_multiplies_on_the_cpu_what_the_gpu_does_not_hold():
    rival = way("llama.cpp Q8_0")
    found, used = limit_elsewhere(SHAPE, rival, MACHINE), sizes.token_bytes(SHAPE, rival)
    assert found.seconds == pytest.approx(found.device * used / 1000 / GB + found.dram * used / 50 / GB)


def test_what_nothing_holds_comes_from_the_disk():
    small = resized(MACHINE, dram_bytes=2 * GB)
    found = limit_elsewhere(SHAPE, way("dense"), small)
    assert found.storage > 0.5
    assert found.seconds == pytest.approx(found.storage * sizes.token_bytes(SHAPE, way("dense")) / 2 / GB)
    with pytest.raises(UserError, match="round has no disk"):
        limit_elsewhere(SHAPE, way("dense"), replace(small, links=Links(dram_to_device_gb_s=10)))


def test_the_command_plans_for_another_machine(capsys):
    assert main(["plan", "llama2-7b", "--machine", "endor-rtx4080", "--device-memory", "2GB"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("llama2-7b on endor-rtx4080 with --device-memory 2GB: limits by bytes")
    assert "nothing was measured there" in " ".join(shown.split())
    assert "int8" in shown
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "* " in shown
    assert "is a guess" in shown  # of the fastest within the loss
    assert main(["plan", "llama2-7b", "--machine", "endor"]) == 2
    assert profile("endor-rtx4080").id in capsys.readouterr().err


def test_bounds_by_hand():
    """Dense Llama-2-7B: 32 layers of 404.8 MB; those outside memory are read."""
    target = open_target("llama2-7b")
    table = bounds(target, 8 * GB).set_index("way")
    memory = sizes.footprint(target.shape, way("dense"))
    held = (8 * GB - memory.fixed_bytes) / 404.75e6
    assert table.loc["dense", "read_mb"] == pytest.approx((32 - held) * 404.75, rel=1e-3)
    assert table.loc["dense", "token_mb"] == pytest.approx(32 * 404.75 + 262.1, rel=1e-3)
    assert table["read_mb"].is_monotonic_increasing
    assert (table["needed_mb"] <= 8000).all()
    mixture = bounds(open_target("mixtral-8x7b"), 40 * GB).set_index("way")
    used = 2 * 32 * 3 * 4096 * 14336 * 2 / 1e6  # two experts of each layer, in 16 bits
    assert 0 < mixture.loc["experts, 16 bits", "read_mb"] < used
    assert bounds(target, 10_000_000).empty
