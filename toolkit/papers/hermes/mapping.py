"""Which neurons of a model lie on the GPU and on which NDP-DIMM: the offline mapping (Hermes, section IV-B).

    blocks = [NeuronBlock(frequency, gpu_s=3e-8, dimm_s=6e-7, neuron_bytes=24576) for frequency in frequencies]
    mapping = greedy(blocks, Room(gpu_bytes=8 << 30, dimms=8, dimm_bytes=32 << 30))
    mapping.hot[0], mapping.dimm[0], mapping.seconds, mapping.gap

All weights lie on the DIMMs, and hot neurons are copied to the GPU. A token's time is a sum over blocks. A block takes
the longer of two times: two transfers and the GPU's neurons, or the neurons of the slowest DIMM; each neuron counts by
its frequency. `greedy` takes a tenth of a second for LLaMA-7B and carries its certificate, the optimum of the linear
relaxation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int64

from toolkit.errors import UserError
from toolkit.papers.hermes.dimms import in_snake_order, loads


@dataclass(frozen=True, eq=False)
class NeuronBlock:
    """Neurons that one barrier waits for: an attention block, or an FFN.

    Args:
        frequency: the share of tokens that each neuron is active for; for a batch, how many tokens of it.
        gpu_s, dimm_s: seconds that an active neuron takes on the GPU and on a DIMM, one number or one for each.
        neuron_bytes: of a neuron's weights, one number or one for each.
    """

    frequency: Float64[np.ndarray, " neurons"]
    gpu_s: Float64[np.ndarray, " neurons"]
    dimm_s: Float64[np.ndarray, " neurons"]
    neuron_bytes: Int64[np.ndarray, " neurons"]

    def __post_init__(self):
        """One number for all neurons becomes one for each."""
        for field in fields(self):
            kind = np.int64 if field.name == "neuron_bytes" else np.float64
            values = np.broadcast_to(np.asarray(getattr(self, field.name), dtype=kind), np.shape(self.frequency))
            object.__setattr__(self, field.name, values)

    @property
    def gpu_load(self) -> Float64[np.ndarray, " neurons"]:
        """Expected seconds of each neuron on the GPU."""
        return self.frequency * self.gpu_s

    @property
    def dimm_load(self) -> Float64[np.ndarray, " neurons"]:
        """Expected seconds of each neuron on a DIMM."""
        return self.frequency * self.dimm_s

    @cached_property
    def by_saving(self) -> Int64[np.ndarray, " neurons"]:
        """The neurons in the order in which they go to the GPU: most DIMM time per byte first."""
        return np.argsort(-self.dimm_load / self.neuron_bytes, kind="stable")


@dataclass(frozen=True)
class Room:
    """The memory there is for neurons, and `sync_s`, seconds of a transfer between GPU and DIMMs (a block has two).

    `gpu_bytes` is the GPU's memory beside the weights that must lie there. Raises `UserError` if it is below 0.
    """

    gpu_bytes: int
    dimms: int
    dimm_bytes: int
    sync_s: float = 0.0

    def __post_init__(self):
        """Refuse a GPU that is too small."""
        if self.gpu_bytes < 0:
            raise UserError(
                f"the GPU lacks {-self.gpu_bytes} bytes for the weights that must lie on it: take a larger one"
            )


@dataclass(frozen=True, eq=False)
class NeuronMap:
    """Where the neurons of each block lie.

    Args:
        hot: the neurons on the GPU.
        dimm: the DIMM of each neuron, hot ones included.
        seconds: expected time of a token.
        bound_s: no mapping takes less.
    """

    hot: tuple[Bool[np.ndarray, " neurons"], ...]
    dimm: tuple[Int8[np.ndarray, " neurons"], ...]
    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """How far above the bound this mapping is: 0.01 is 1 %. The best one lies between."""
        return self.seconds / self.bound_s - 1 if self.bound_s else 0.0

    @classmethod
    def of(
        cls,
        blocks: Sequence[NeuronBlock],
        room: Room,
        hot: Sequence[Bool[np.ndarray, " neurons"]],
        dimm: Sequence[Int8[np.ndarray, " neurons"]] | None = None,
    ) -> Self:
        """The mapping with these neurons on the GPU. Without `dimm`, neurons are dealt, busy ones first."""
        if dimm is None:
            # the busiest first, but hot ones last: only cold ones keep a DIMM busy
            keys = [np.where(there, 1, -block.dimm_load) for block, there in zip(blocks, hot, strict=True)]
            dimm = [in_snake_order(np.argsort(key, kind="stable"), room.dimms) for key in keys]
        seconds = sum(block_seconds(*each, room) for each in zip(blocks, hot, dimm, strict=True))
        return cls(tuple(hot), tuple(dimm), seconds, lower_bound(blocks, room))


def block_seconds(
    block: NeuronBlock, hot: Bool[np.ndarray, " neurons"], dimm: Int8[np.ndarray, " neurons"], room: Room
) -> float:
    """A block's expected time: GPU with its transfers, or the slowest DIMM (equations 1 to 5)."""
    slowest = loads(np.where(hot, 0, block.dimm_load), dimm, room.dimms).max()
    return float(max(2 * room.sync_s + block.gpu_load[hot].sum(), slowest))


def greedy(blocks: Sequence[NeuronBlock], room: Room) -> NeuronMap:
    """Copy the neuron to the GPU that saves most time per byte, again and again, until memory is full or none saves.

    In the order of DIMM time per byte, each neuron of a block saves less than the one before, and none once the GPU
    takes longer than the DIMMs. So one sort over all blocks finds this mapping.

    Raises `UserError` if the DIMMs do not hold the model.
    """
    nbytes, held = sum(int(block.neuron_bytes.sum()) for block in blocks), room.dimms * room.dimm_bytes
    if nbytes > held:
        raise UserError(
            f"the neurons take {nbytes} bytes, and {room.dimms} DIMMs of {room.dimm_bytes} bytes hold {held}: "
            f"take {-(-nbytes // room.dimm_bytes)} DIMMs or more"
        )
    orders = [block.by_saving for block in blocks]
    savings = np.concatenate([_savings(block, order, room) for block, order in zip(blocks, orders, strict=True)])
    sizes = np.concatenate([block.neuron_bytes[order] for block, order in zip(blocks, orders, strict=True)])
    owner = np.repeat(np.arange(len(blocks)), [len(order) for order in orders])
    saving = np.flatnonzero(savings > 0)
    best = saving[np.argsort(-savings[saving] / sizes[saving], kind="stable")]
    moved = best[sizes[best].cumsum() <= room.gpu_bytes]
    counts = np.bincount(owner[moved], minlength=len(blocks))
    hot = [np.zeros(len(order), dtype=bool) for order in orders]
    for there, order, count in zip(hot, orders, counts, strict=True):
        there[order[:count]] = True
    return NeuronMap.of(blocks, room, hot)


def lower_bound(blocks: Sequence[NeuronBlock], room: Room) -> float:
    """Seconds that no mapping goes below: neurons may be split, and cold ones lie evenly on the DIMMs.

    The optimum of the linear relaxation where `gpu_s` and `dimm_s` have one ratio within a block (equal neurons, or
    times in proportion to bytes), and at most that elsewhere.
    """
    ratios, savings, seconds = [], [], 0.0
    for block in blocks:
        load, least = block.dimm_load / room.dimms, _with_all_memory(block, room)
        seconds += max(load.sum(), least)
        # a neuron saves its DIMM time, until the block takes no longer than with all memory
        ratio, order = load / block.neuron_bytes, block.by_saving
        ratios.append(ratio[order])
        savings.append(np.diff(np.minimum(load[order].cumsum(), max(0.0, load.sum() - least)), prepend=0))
    ratio, saving = np.concatenate(ratios), np.concatenate(savings)
    order = np.flatnonzero(saving > 0)
    order = order[np.argsort(-ratio[order], kind="stable")]
    used = (saving[order] / ratio[order]).cumsum()  # bytes
    return float(seconds - np.interp(room.gpu_bytes, np.append(0, used), np.append(0, saving[order].cumsum())))


def _savings(block: NeuronBlock, order: Int64[np.ndarray, " neurons"], room: Room) -> Float64[np.ndarray, " neurons"]:
    """The seconds that each neuron saves when it follows those before it in `order` to the GPU."""
    gpu, dimms = block.gpu_load[order].cumsum(), block.dimm_load[order] / room.dimms
    cold = np.append(dimms[::-1].cumsum()[::-1], 0)  # after 0, 1, 2 neurons; ends at 0 exactly
    return -np.diff(np.maximum(np.append(0, gpu) + 2 * room.sync_s, cold))


def _with_all_memory(block: NeuronBlock, room: Room) -> float:
    """A block's shortest time on a GPU of any size, where one neuron may be split."""
    order = np.argsort(-block.dimm_s / block.gpu_s, kind="stable")
    gpu = np.append(0, block.gpu_load[order].cumsum()) + 2 * room.sync_s
    dimms = np.append((block.dimm_load[order] / room.dimms)[::-1].cumsum()[::-1], 0)
    after = int(np.argmax(gpu >= dimms))  # neurons on the GPU once it takes longer than the DIMMs; it does at the end
    if after == 0:
        return float(gpu[0])
    rising, falling = gpu[after] - gpu[after - 1], dimms[after - 1] - dimms[after]
    return float(gpu[after - 1] + rising * (dimms[after - 1] - gpu[after - 1]) / (rising + falling))
