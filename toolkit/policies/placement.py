"""The tier that each layer of a model lives in."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import UserError
from toolkit.storage.buffers import buffer_bytes


@dataclass(frozen=True)
class LayerMap:
    """The number of layers in each tier. The first layers are nearest to the device. Raises `UserError` below 0."""

    device: int
    dram: int
    storage: int

    def __post_init__(self):
        """Refuse negative counts."""
        if min(self.device, self.dram, self.storage) < 0:
            raise UserError(f"{self}: expected 0 layers or more in each tier")

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tier of each layer, in the model's order."""
        return ("device",) * self.device + ("dram",) * self.dram + ("storage",) * self.storage

    def refilled(self, dense_bytes: int, packed_bytes: int) -> "LayerMap":
        """The map with packed layers: DRAM takes as many as fit into the bytes of the dense layers that it held.

        8 layers become 14 at 56 % of their size (ENDOR, section 5.1). Only layers in storage move. Layers in device
        memory stay, since they are dense there.
        """
        dram = min(self.dram * dense_bytes // packed_bytes, self.dram + self.storage)
        return LayerMap(self.device, dram, self.dram + self.storage - dram)


def fitting(staying: Sequence[int], passing: Sequence[int], slots: int, budget_bytes: float) -> int:
    """How many of the first layers a tier's budget can keep beside the slots that the other layers pass through.

    `staying` and `passing` are each layer's bytes if it stays and if it passes through. 0 if not even the slots fit.
    """
    for count in range(len(staying), -1, -1):
        if needed_bytes(staying[:count], passing[count:], slots) <= budget_bytes:
            return count
    return 0


def needed_bytes(staying: Sequence[int], passing: Sequence[int], slots: int) -> int:
    """Bytes of the layers that stay and of the slots for the others. Each is a buffer of whole huge pages."""
    return buffer_bytes(sum(staying)) + buffer_bytes(min(slots, len(passing)) * max(passing, default=0))
