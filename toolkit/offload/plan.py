"""The plan of a pass: the layers that it needs, the tier of each, and the memory that this takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from toolkit.offload.budget import Budget
from toolkit.offload.placement import LayerMap, fitting, needed_bytes
from toolkit.offload.ways import POLICIES, Way
from toolkit.storage.buffers import buffer_bytes

if TYPE_CHECKING:  # they need torch, and a plan does not
    from toolkit.offload.device import Cpu, Cuda
    from toolkit.offload.options import Options
    from toolkit.storage.runs import Layer

OF_FREE = 0.9  # share of free memory that weights and buffers may take when no budget is given


@dataclass(frozen=True)
class Plan:
    """The layers of a pass in order, the tier that each lives in, and the way of running them.

    A tier is "device", "dram" or "storage". `layers` list the ops of each layer that are brought: all or some.
    """

    layers: "Sequence[Layer]"
    tiers: Sequence[str]
    way: Way

    def numbers(self, *tiers: str) -> list[int]:
        """The layers that live in these tiers."""
        return [number for number, tier in enumerate(self.tiers) if tier in tiers]

    @property
    def slots(self) -> int:
        """How many buffers the layers pass through that do not stay."""
        return POLICIES[self.way.policy].slots

    def past_dram(self) -> Self:
        """The plan of those layers that need DRAM, when layers in storage are read straight into a GPU's memory."""
        return replace(self, tiers=["device" if tier == "storage" else tier for tier in self.tiers])


def forms(layers: "Sequence[Layer]", way: Way) -> "tuple[list[Layer], list[Layer]]":
    """How each layer lies in the memory of the device that computes: if it stays there, and if it passes through.

    On the CPU both are as stored. On a GPU, layers that stay are dense unless they are used packed; layers that pass
    are dense only if the CPU unpacks them.
    """
    stored, decoded_in = list(layers), way.stored.decoded_in if way.device == "gpu" else None
    dense = [layer.unpacked() for layer in layers] if decoded_in else stored
    return dense, dense if decoded_in == "dram" else stored


def staging_bytes(layers: "Sequence[Layer]", way: Way) -> int:
    """Pinned bytes that the CPU unpacks a matrix into on its way to a GPU: the largest matrix, or none."""
    return buffer_bytes(largest_bytes(layers)) if way.stored.decoded_in == "dram" else 0


def largest_bytes(layers: "Sequence[Layer]") -> int:
    """Bytes of the largest matrix of these layers when dense."""
    return max((run.dense_bytes for layer in layers for run in layer.ops.values()), default=0)


def scratch_bytes(layers: "Sequence[Layer]", way: Way) -> int:
    """Scratch bytes for the largest weight when dense, in the memory of the processor that multiplies."""
    _, passing = forms(layers, way)
    return max(run.scratch_bytes for layer in passing for run in layer.ops.values())


def budgets_of(options: "Options", device: "Cpu | Cuda") -> dict[str, Budget]:
    """The budgets of the tiers "dram" and "device"."""
    from toolkit.offload.device import Cpu

    free = {found.tier: int(OF_FREE * found.free_bytes) for found in (Cpu(), device)}
    limits = {"dram": options.dram_bytes, "device": options.device_bytes}
    limits |= {tier: nbytes for tier, nbytes in free.items() if limits[tier] is None}
    return {"dram": Budget("DRAM", limits["dram"]), "device": Budget("device", limits["device"])}


def placed(layers: "Sequence[Layer]", way: Way, budgets: Mapping[str, Budget], fixed: Mapping[str, int]) -> LayerMap:
    """Put the first layers on the device, and of the others as many as fit into DRAM, spread evenly.

    The `fixed` bytes are needed where products are taken. Raises `UserError` for a budget that is too small for any
    map.
    """
    on_device = 0
    if way.device == "gpu":
        staying, passing = ([layer.nbytes for layer in found] for found in forms(layers, way))
        on_device = _fitting(staying, passing, way, budgets["device"], fixed)
        fixed = {"staging": staging_bytes(layers, way)}
    stored = [layer.nbytes for layer in layers[on_device:]]
    passing = [0] * len(stored) if way.path == "direct" else stored
    in_dram = _fitting(stored, passing, way, budgets["dram"], fixed, spread=True)
    return LayerMap(on_device, in_dram, len(stored) - in_dram, spread=True)


def _fitting(
    staying: Sequence[int],
    passing: Sequence[int],
    way: Way,
    budget: Budget,
    fixed: Mapping[str, int],
    spread: bool = False,
) -> int:
    """How many layers can stay. Raises `UserError` unless all can stay, or all can pass through the slots."""
    slots = POLICIES[way.policy].slots
    least = min(needed_bytes([], passing, slots), needed_bytes(staying, [], slots))
    budget.check(**fixed, slots=least)
    return fitting(staying, passing, slots, budget.left_bytes - sum(fixed.values()), spread)
