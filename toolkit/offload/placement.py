"""The tier that each layer of a model lives in, and the rows of memory that the neurons of each layer share."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Self

from toolkit.errors import UserError, unknown
from toolkit.offload.methods import RIVALS
from toolkit.offload.ways import POLICIES, Way
from toolkit.storage.buffers import HUGE_PAGE_BYTES, buffer_bytes

IN_MEMORY = 13 / 64  # of OPT-66B's layers, on GPU and CPU (ENDOR, section 3.3)


@dataclass(frozen=True)
class LayerMap:
    """The number of layers in each tier. The first layers are on the device. Raises `UserError` below 0.

    Layers in DRAM come before those in storage, as in ENDOR. If they are `spread` evenly among those in storage, the
    disk goes on reading while they are used.
    """

    device: int
    dram: int
    storage: int
    spread: bool = False

    def __post_init__(self):
        """Refuse negative counts."""
        if min(self.device, self.dram, self.storage) < 0:
            raise UserError(f"{self}: expected 0 layers or more in each tier")

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tier of each layer, in the model's order."""
        first, count = ("device",) * self.device, self.dram + self.storage
        if not self.spread:
            return first + ("dram",) * self.dram + ("storage",) * self.storage
        read = (at * self.storage % count < self.storage for at in range(1, count + 1))
        return first + tuple("storage" if is_read else "dram" for is_read in read)

    def refilled(self, dense_bytes: int, packed_bytes: int) -> "LayerMap":
        """The map with packed layers: DRAM takes as many as fit into the bytes of the dense layers that it held.

        8 layers become 14 at 56 % of their size (ENDOR, section 5.1). Only layers in storage move. Layers in device
        memory stay, since they are dense there.
        """
        dram = min(self.dram * dense_bytes // packed_bytes, self.dram + self.storage)
        return LayerMap(self.device, dram, self.dram + self.storage - dram)


def fitting(
    staying: Sequence[int], passing: Sequence[int], slots: int, budget_bytes: float, spread: bool = False
) -> int:
    """How many layers a tier's budget can keep beside the slots that the other layers pass through.

    They are the first layers, or `spread` as in `LayerMap`. `staying` and `passing` are each layer's bytes if it stays
    and if it passes through. 0 if not even the slots fit.
    """
    for count in range(len(staying), -1, -1):
        stays = [tier == "dram" for tier in LayerMap(0, count, len(staying) - count, spread).tiers]
        passes = [not stay for stay in stays]
        if needed_bytes(list(compress(staying, stays)), list(compress(passing, passes)), slots) <= budget_bytes:
            return count
    return 0


def filled(sizes: Sequence[int], slots: int, budget_bytes: float) -> tuple[str, ...]:
    """The tier of each piece, "dram" or "storage": those that stay fill a budget beside the slots for the others.

    Slots hold the largest piece that passes, so smaller ones are tried for which all larger pieces stay. The way that
    reads the fewest bytes is taken. Pieces that pass are spread evenly by bytes, so that the disk goes on
    reading while others are used. Slots that do not fit make all pieces pass.
    """
    if needed_bytes(sizes, [], slots) <= budget_bytes:
        return ("dram",) * len(sizes)
    ways = (_filled(sizes, largest, slots, budget_bytes) for largest in sorted(set(sizes), reverse=True))
    return min(ways, key=lambda tiers: sum(compress(sizes, (tier == "storage" for tier in tiers))))


def _filled(sizes: Sequence[int], largest: int, slots: int, budget_bytes: float) -> tuple[str, ...]:
    """The same where only pieces of up to `largest` bytes pass; all pass if the others do not fit."""
    room = int(budget_bytes - buffer_bytes(slots * largest)) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    stays = [size > largest for size in sizes]
    room -= sum(compress(sizes, stays))
    total, reached, kept = sum(size for size in sizes if size <= largest), 0, 0
    if room < 0:
        return ("storage",) * len(sizes)
    for number, size in enumerate(sizes):
        if not stays[number]:
            reached += size
            if (kept + size) * total <= room * reached:
                stays[number], kept = True, kept + size
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):  # what the even share has left
        if not stays[number] and kept + sizes[number] <= room:
            stays[number], kept = True, kept + sizes[number]
    return tuple("dram" if stay else "storage" for stay in stays)


def least_bytes(sizes: Sequence[int], slots: int) -> int:
    """The fewest bytes that layers of these sizes need: all stay, or all pass through the slots."""
    return min(needed_bytes([], sizes, slots), needed_bytes(sizes, [], slots))


def needed_bytes(staying: Sequence[int], passing: Sequence[int], slots: int) -> int:
    """Bytes of the layers that stay and of the slots for the others, each a buffer of whole huge pages."""
    return buffer_bytes(sum(staying)) + buffer_bytes(min(slots, len(passing)) * max(passing, default=0))


def place_layers(way: Way, mapping: str, layers: int, dense_bytes: int = 1, packed_bytes: int = 1) -> LayerMap:
    """Where the layers of a way live, for layers of these bytes.

    OPT-66B has 13 of 64 layers on GPU and CPU (ENDOR, section 3.3). Our measurements compute on the CPU, so DRAM is the
    nearest tier and takes that share (`published`). `refilled` is the number of packed layers that fit into the bytes
    of these. Raises `UserError` for an unknown mapping, or if buffers keep all layers in storage: a second token would
    find them there and read nothing.
    """
    near = round(layers * IN_MEMORY)
    published = LayerMap(0, near, layers - near)
    maps = {"storage": LayerMap(0, 0, layers), "dram": LayerMap(0, layers, 0), "published": published}
    maps["refilled"] = published.refilled(dense_bytes, packed_bytes)
    if mapping not in maps:
        raise unknown("mapping", mapping, maps)
    where = maps[mapping]
    slots = 0 if way.method in RIVALS else POLICIES[way.policy].slots
    if 0 < where.storage <= slots:
        raise UserError(
            f"{way.method}, {way.policy}, {mapping}: layers in storage: {where.storage} of {layers}; its buffers "
            f"keep {slots}, so that a second token reads nothing: expected none or more than {slots}; take more layers"
        )
    return where


@dataclass(frozen=True)
class Shares:
    """`rows` of memory for each layer; and `passing` rows that all layers without rows of their own use in turn."""

    rows: tuple[int, ...]
    passing: int

    @classmethod
    def keeping_nothing(cls, rows: int, neurons: Sequence[int]) -> Self:
        """Every layer's neurons only pass. Raises `UserError` for less than one row."""
        return cls((0,) * len(neurons), min(_at_least(1, rows), max(neurons)))

    @classmethod
    def of(cls, rows: int, needs: Sequence[int], neurons: Sequence[int], passing: int) -> Self:
        """Share so many rows among layers that have `neurons`, of which a token `needs` some.

        A layer gets at least what it needs, and what is left is shared in proportion to the needs. A layer that needs
        all its neurons gets them all or none: the others come first, then these in order. If one gets none, `passing`
        rows are set apart. Raises `UserError` for less than `least`.
        """
        if rows >= sum(neurons):
            return cls(tuple(neurons), 0)
        _at_least(cls.least(needs, neurons, passing), rows)
        found = [_partial(need, count) for need, count in zip(needs, neurons, strict=True)]
        whole = [layer for layer, count in enumerate(found) if not count]
        left = rows - sum(found) - (passing := passing if whole else 0)
        for layer in whole:
            if neurons[layer] <= left:
                found[layer], left = neurons[layer], left - neurons[layer]
        return cls(tuple(_grown(found, left, needs, neurons)), passing)

    @staticmethod
    def least(needs: Sequence[int], neurons: Sequence[int], passing: int) -> int:
        """The fewest rows that can be shared."""
        found = [_partial(need, count) for need, count in zip(needs, neurons, strict=True)]
        return min(sum(neurons), sum(found) + passing * (0 in found))


def _grown(rows: list[int], left: int, needs: Sequence[int], neurons: Sequence[int]) -> list[int]:
    """Share out what is left among layers that have some rows and not all, until each has all or nothing is left."""
    while growing := [layer for layer, count in enumerate(rows) if 0 < count < neurons[layer]]:
        weights, before = {layer: max(1, needs[layer]) for layer in growing}, left
        total = sum(weights.values())
        for layer in growing:
            more = min(neurons[layer] - rows[layer], before * weights[layer] // total)
            rows[layer], left = rows[layer] + more, left - more
        if left == before:
            break
    return rows


def _partial(need: int, neurons: int) -> int:
    return max(1, need) if need < neurons else 0


def _at_least(least: int, rows: int) -> int:
    if rows < least:
        raise UserError(f"{rows} neurons fit into memory, and one token needs {least}: allow {least} or more")
    return rows
