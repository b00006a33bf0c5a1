"""The memory that a way of running a model takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.storage.buffers import buffer_bytes


@dataclass(frozen=True)
class Footprint:
    """The DRAM of a way.

    `fixed_bytes` are always held; `units` parts of `unit_bytes` each (layers, or neurons or experts of all layers) are
    held as far as memory allows, `least_bytes` at least for those under way. A layer may pass through memory in pieces,
    the largest of which has `piece_bytes`.
    """

    fixed_bytes: int
    unit_bytes: int
    units: int
    least_bytes: int
    piece_bytes: int | None = None

    @property
    def passing_bytes(self) -> int:
        """Bytes of what passes through memory at once: a piece of a unit, or all of it."""
        return self.unit_bytes if self.piece_bytes is None else self.piece_bytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of all weights."""
        return self.fixed_bytes + self.units * self.unit_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes below which the way does not run."""
        return self.fixed_bytes + self.least_bytes

    @property
    def all_bytes(self) -> int:
        """Bytes that hold everything, so that a token reads nothing."""
        return self.fixed_bytes + buffer_bytes(self.units * self.unit_bytes)

    def held_share(self, dram_bytes: float) -> float:
        """The share of the units that so many bytes hold beside what is fixed."""
        return max(0.0, min(1.0, (dram_bytes - self.fixed_bytes) / (self.units * self.unit_bytes)))


@dataclass(frozen=True, eq=False)
class FileBytes:
    """The bytes of a GGUF file that is run as it is.

    memory: what stays there and what is read. types: those of a token's products, by the type of their blocks.
    """

    memory: Footprint
    types: Mapping[str, int]
