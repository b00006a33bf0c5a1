"""Which tier each layer of a model lives in."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import UserError
from toolkit.storage.buffers import buffer_bytes


@dataclass(frozen=True)
class LayerMap:
    """How many layers live in each tier, the first ones nearest to the device. Raises `UserError` for fewer than 0."""

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
        """The map once layers are packed, and DRAM takes as many as fit into the bytes that its dense ones took.

        8 layers become 14 at 56 % of their size (ENDOR, section 5.1). Layers come from storage only; device memory is
        left as it is, since what lives there is dense.
        """
        dram = min(self.dram * dense_bytes // packed_bytes, self.dram + self.storage)
        return LayerMap(self.device, dram, self.dram + self.storage - dram)


def nearest_first(layer_bytes: Sequence[int], budget_bytes: float, slots: int) -> LayerMap:
    """As many of the first layers in DRAM as a budget allows, beside the slots that the others stream through.

    Bytes are what is stored, so packed layers make room for more. If not even the slots fit, all layers are in storage.
    """
    count = len(layer_bytes)
    for dram in range(count, -1, -1):
        if needed_bytes(layer_bytes[:dram], layer_bytes[dram:], slots) <= budget_bytes:
            return LayerMap(0, dram, count - dram)
    return LayerMap(0, 0, count)


def needed_bytes(resident: Sequence[int], streamed: Sequence[int], slots: int) -> int:
    """What layers that stay take, and the slots for the others: each a buffer of whole huge pages."""
    return buffer_bytes(sum(resident)) + buffer_bytes(min(slots, len(streamed)) * max(streamed, default=0))
