"""The ways by their bytes alone, which are known before a machine is measured.

    bounds(open_target("llama2-7b"), dram_bytes=6_000_000_000)                               # on this machine
    best_elsewhere(open_target("mixtral-8x7b"), profile("corm-rtx3090ti"), loss=0.25)        # on another one

The nearest memory holds as much as fits (device, then DRAM); the rest comes from the disk. Weights in DRAM are copied
to the GPU for each token; llama.cpp multiplies them on the CPU instead. Links and memories work beside each other, so
the slowest of them decides; in llama.cpp one follows the other. Kernels are assumed to reach a memory's whole
bandwidth, so each number is an upper limit.
"""

from dataclasses import dataclass, replace

import pandas as pd

from toolkit.errors import UserError
from toolkit.machines.machine import GB, Profile
from toolkit.models.architectures import ModelShape
from toolkit.papers.corm.cost_model import RESERVED_BYTES
from toolkit.planner import sizes
from toolkit.planner.hits import expert_hits, unmapped_share
from toolkit.planner.prices import TEXT, price_of
from toolkit.planner.speed import Machine, Speed
from toolkit.planner.target import Target
from toolkit.planner.ways import EXPERTS, NEURONS, RIVAL, STREAMED, PlannedWay, ways

GPU, CUDA = "GPU", "--device cuda"  # what limits, and the option of `run`
OF_DRAM = 0.9  # of its capacity, for weights
SHARES = ("device", "dram", "storage")


@dataclass(frozen=True)
class Bound:
    """The shares of a model's weights in each memory, or on the disk, the seconds of a token, and their limit."""

    device: float
    dram: float
    storage: float
    seconds: float
    limit: str


def bounds(target: Target, dram_bytes: float) -> pd.DataFrame:
    """A row for each way of the toolkit that fits into so many bytes of DRAM, the least reads first.

    Columns: way; read_mb (from the disk for a token, if parts in memory are needed as often as the rest); token_mb (of
        weights that a token is multiplied with); needed_mb (of DRAM, at least). A token takes no less than read_mb at
        the disk's bandwidth, and no less than token_mb at the memory's.
    """
    shape, rows = target.shape, []
    for way in target.ways:
        try:
            memory = sizes.footprint(shape, way)
        except UserError:  # a way that this model does not have
            continue
        if way.runs_here and memory.needed_bytes <= dram_bytes:
            used = memory.units * (1 - way.sparsity) if way.kind == NEURONS else memory.units
            if way.kind == EXPERTS:
                used = shape.experts_per_token * shape.routed_layers
            read = (1 - memory.held_share(dram_bytes)) * used * memory.unit_bytes
            numbers = {"read_mb": read, "token_mb": sizes.token_bytes(shape, way), "needed_mb": memory.needed_bytes}
            rows.append({"way": way.name} | {name: nbytes / 1e6 for name, nbytes in numbers.items()})
    table = pd.DataFrame(rows, columns=["way", "read_mb", "token_mb", "needed_mb"])
    return table.sort_values(["read_mb", "token_mb"], kind="stable").reset_index(drop=True)


def limit_elsewhere(shape: ModelShape, way: PlannedWay, machine: Profile) -> Bound:
    """The quickest that a token can be on a machine, by bytes.

    Raises `UserError` for a model that fits nowhere: with a disk that is missing, or parts that must stay too large.
    """
    memory, used = sizes.footprint(shape, way), sizes.token_bytes(shape, way)
    whole, own = memory.whole_bytes, not machine.unified and machine.device is not None
    device = max(0.0, machine.device.capacity_bytes - RESERVED_BYTES) if own else 0.0
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
        missed = 1 - expert_hits(shape, on_device if own else in_dram)
        moved = {"dram": missed if own and in_dram else 0.0, "storage": 0.0}
        if on_disk:
            moved["storage"] = 1 - expert_hits(shape, on_device + in_dram)
    elif way.kind == RIVAL and on_disk:
        moved["storage"] = unmapped_share(shape, on_device + in_dram)
    read_s = moved["storage"] * used / GB / read_gb_s if on_disk else 0.0
    if way.kind == RIVAL:
        parts_s = on_device * used / GB / near.bandwidth_gb_s
        if in_dram or on_disk:
            parts_s += (in_dram + on_disk) * used / GB / machine.dram.bandwidth_gb_s
        limits = {"DRAM" if in_dram or on_disk or near is machine.dram else GPU: parts_s, "disk": read_s}
    else:
        copied = (moved["dram"] + moved["storage"]) * used if own else 0.0
        copy_s = copied / GB / machine.links.dram_to_device_gb_s if copied else 0.0
        limits = {
            "DRAM" if near is machine.dram else GPU: used / GB / near.bandwidth_gb_s,
            "copies": copy_s,
            "disk": read_s,
        }
    limit = max(limits, key=limits.__getitem__)
    return Bound(on_device, in_dram, on_disk, limits[limit], limit)


def gpu_ways(experts: bool) -> list[PlannedWay]:
    """The ways with this machine's GPU: layers streamed to it, and llama.cpp. Experts are for the CPU alone."""
    known = [way for way in ways(experts) if way.kind in (RIVAL, STREAMED)]
    return [replace(way, name=f"{way.name}, GPU", run=f"--weights packed {CUDA}") for way in known]


def limit_on_gpu(shape: ModelShape, way: PlannedWay, machine: Machine, device_bytes: int | None = None) -> Speed:
    """The most that a way reaches with this machine's GPU, by bytes; nothing is timed there.

    `device_bytes` is what weights and buffers may take of the GPU's memory; None leaves a part of it for the rest.
    Raises `UserError` for what `run --device cuda` refuses: embedding, head and the layer in use are in the GPU's
    memory, and what passes through DRAM takes buffers there.
    """
    device = device_bytes or max(0, machine.profile.device.capacity_bytes - RESERVED_BYTES)
    memory, used = sizes.footprint(shape, way), sizes.token_bytes(shape, way)
    passing = max(memory.least_bytes, sizes.head_bytes(shape)) if way.kind == STREAMED else 0
    for where, needed, given in (("GPU memory", memory.needed_bytes, device), ("DRAM", passing, machine.dram_bytes)):
        if needed > given:
            raise UserError(f"{way.name}: needs {needed / 1e6:.0f} MB of {where}, {given / 1e6:.0f} MB are given")
    found = limit_elsewhere(shape, way, resized(machine.profile, machine.dram_bytes, device))
    read, dram, held = round(found.storage * used), round(found.dram * memory.whole_bytes), found.device + found.dram
    return Speed(found.seconds, float("nan"), read, dram, held, found.limit, at_best=True)


def resized(machine: Profile, dram_bytes: int | None = None, device_bytes: int | None = None) -> Profile:
    """The machine with so many bytes for weights and buffers in its memories.

    Raises `UserError` for a memory that it does not have.
    """
    if machine.unified and device_bytes is not None:
        raise UserError(
            f"{machine.id} has one memory for CPU and GPU: give its size by --dram, without --device-memory"
        )
    sizes_of = {
        "dram": None if dram_bytes is None else dram_bytes / OF_DRAM,
        "device": None if device_bytes is None else device_bytes + RESERVED_BYTES,
    }
    for tier, nbytes in sizes_of.items():
        memory = getattr(machine, tier)
        if nbytes is not None and memory is None:
            raise UserError(f"{machine.id} has no {tier}: leave its size out, or choose another machine")
        if nbytes is not None:
            machine = replace(machine, **{tier: replace(memory, capacity_bytes=nbytes)})
    return machine


def best_elsewhere(target: Target, machine: Profile, loss: float, text: str = TEXT) -> pd.DataFrame:
    """A row for each way that can run, the quickest within the loss first, if any is.

    Columns: model, profile, way, tokens_s, device, dram and storage (shares), relative (perplexity, NaN if nobody has
    measured it), quality_of (the measured model), guess (that is another one), within (the loss), evidence.
    """
    rows = []
    for way in target.ways:
        if way.kind == NEURONS or (way.file and way.kind != RIVAL):
            continue
        try:
            placed = limit_elsewhere(target.shape, way, machine)
        except UserError:
            continue
        price = price_of(target, way, text)
        row = {"way": way.name, "tokens_s": 1 / placed.seconds, "relative": price.ratio}
        row |= {"within": price.ratio <= 1 + loss, "quality_of": price.model, "guess": price.guess}
        rows.append(row | {name: getattr(placed, name) for name in SHARES})
    columns = ["way", "tokens_s", "relative", "within", "quality_of", "guess", *SHARES]
    table = pd.DataFrame(rows, columns=columns)
    table = table.sort_values(["within", "tokens_s"], ascending=False, kind="stable").reset_index(drop=True)
    return table.assign(model=target.name, profile=machine.id, evidence="modelled")
