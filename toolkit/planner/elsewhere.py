"""The ways on other machines: a limit by bytes, since nothing was measured there.

    best_elsewhere(open_target("mixtral-8x7b"), profile("corm-rtx3090ti"), loss=0.25)

The nearest memory holds what fits (device, then DRAM), the rest comes from the disk. Weights in DRAM are copied to the
GPU for each token; llama.cpp multiplies them on the CPU instead. Links and memories work beside each other, so the
slowest of them decides; in llama.cpp one follows the other. What kernels reach of a memory's bandwidth is left out, so
each number is the most that the way can reach there.
"""

from dataclasses import dataclass, replace

import pandas as pd

from toolkit.errors import UserError
from toolkit.machines.machine import GB, Profile
from toolkit.models.architectures import ModelShape
from toolkit.planner import sizes
from toolkit.planner.hits import expert_hits
from toolkit.planner.quality import price_of
from toolkit.planner.target import Target
from toolkit.planner.ways import EXPERTS, RIVAL, PlannedWay, ways
from toolkit.simulation.experts import RESERVED_BYTES

OF_DRAM = 0.9  # of its capacity, for weights


@dataclass(frozen=True)
class Placed:
    """The shares of a model's weights in each memory, or on the disk, and the seconds of a token."""

    device: float
    dram: float
    storage: float
    seconds: float


def limit_elsewhere(shape: ModelShape, way: PlannedWay, machine: Profile) -> Placed:
    """The quickest that a token can be on a machine, by bytes.

    Raises `UserError` for a model that fits nowhere: with a disk that is missing, or parts that must stay too large.
    """
    memory, used = sizes.footprint(shape, way), sizes.token_bytes(shape, way)
    whole = memory.fixed_bytes + memory.units * memory.unit_bytes
    device = 0.0 if machine.unified or machine.device is None else machine.device.capacity_bytes - RESERVED_BYTES
    dram = OF_DRAM * machine.dram.capacity_bytes if machine.dram else 0.0
    if memory.needed_bytes > device + dram:
        raise UserError(
            f"{way.name}: needs {memory.needed_bytes / GB:.1f} GB; {machine.id} has {(device + dram) / GB:.1f}"
        )
    on_device = min(1.0, device / whole)
    in_dram = min(1.0 - on_device, dram / whole)
    on_disk = 1.0 - on_device - in_dram
    read_gb_s = machine.links.storage_to_dram_gb_s
    if on_disk and read_gb_s is None:
        raise UserError(f"{way.name}: {whole / GB:.1f} GB do not fit; {machine.id} has no disk")
    near = machine.dram if machine.unified or not machine.device else machine.device
    moved = {"dram": in_dram, "storage": on_disk}
    if way.kind == EXPERTS:
        missed = 1 - expert_hits(shape, on_device or in_dram)
        moved = {"dram": missed if device and in_dram else 0.0, "storage": 0.0}
        if on_disk:
            moved["storage"] = 1 - expert_hits(shape, on_device + in_dram)
    read_s = moved["storage"] * used / GB / read_gb_s if on_disk else 0.0
    if way.kind == RIVAL:
        parts_s = on_device * used / GB / near.bandwidth_gb_s
        if in_dram or on_disk:
            parts_s += (in_dram + on_disk) * used / GB / machine.dram.bandwidth_gb_s
        return Placed(on_device, in_dram, on_disk, max(parts_s, read_s))
    copied = (moved["dram"] + moved["storage"]) * used if device else 0.0
    copy_s = copied / GB / machine.links.dram_to_device_gb_s if copied else 0.0
    return Placed(on_device, in_dram, on_disk, max(used / GB / near.bandwidth_gb_s, copy_s, read_s))


def resized(machine: Profile, dram_bytes: int | None = None, device_bytes: int | None = None) -> Profile:
    """The machine with other sizes of its memories. Raises `UserError` for a memory that it does not have."""
    for tier, nbytes in {"dram": None if dram_bytes is None else dram_bytes / OF_DRAM, "device": device_bytes}.items():
        memory = getattr(machine, tier)
        if nbytes is not None and memory is None:
            raise UserError(f"{machine.id} has no {tier}: leave its size out, or choose another machine")
        if nbytes is not None:
            machine = replace(machine, **{tier: replace(memory, capacity_bytes=nbytes)})
    return machine


def best_elsewhere(target: Target, machine: Profile, loss: float) -> pd.DataFrame:
    """A row for each way that can run, the quickest within the loss first, if any is.

    Columns: model, profile, way, tokens_s, device, dram and storage (shares), relative (perplexity, NaN if nobody has
    measured it), within (the loss), evidence.
    """
    rows = []
    for way in ways(bool(target.shape.experts)):
        try:
            placed = limit_elsewhere(target.shape, way, machine)
        except UserError:
            continue
        price = price_of(target, way)
        relative = price.ratio if price else float("nan")
        row = {"way": way.name, "tokens_s": 1 / placed.seconds, "relative": relative, "within": relative <= 1 + loss}
        rows.append(row | {name: getattr(placed, name) for name in ("device", "dram", "storage")})
    table = pd.DataFrame(rows, columns=["way", "tokens_s", "relative", "within", "device", "dram", "storage"])
    table = table.sort_values(["within", "tokens_s"], ascending=False, kind="stable").reset_index(drop=True)
    return table.assign(model=target.name, profile=machine.id, evidence="modelled")
