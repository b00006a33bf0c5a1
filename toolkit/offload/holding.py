"""How much of a model is in memory, in words: of its layers, of its neurons, or of its experts."""

from typing import TYPE_CHECKING

from toolkit.offload.by_expert import ByExpert
from toolkit.offload.by_neuron import ByNeuron
from toolkit.offload.device import Cuda

if TYPE_CHECKING:
    from toolkit.offload.model import OffloadedModel


def holding(model: "OffloadedModel") -> str:
    """The part of the weights that is in memory, and the bytes that each tier holds."""
    strategy = model.strategy
    if isinstance(strategy, ByNeuron):
        parts = _neurons(model, strategy)
    elif isinstance(strategy, ByExpert):
        parts = _experts(model, strategy)
    else:
        parts = _layers(model)
    held = [f"{budget.used_bytes / 1e6:.1f} MB {budget.tier}" for budget in model.budgets.values() if budget.used_bytes]
    return f"{parts}; {' and '.join(held)} held"


def _layers(model: "OffloadedModel") -> str:
    where = model.placement
    on_device = f"{where.device} layers on the device, " if model.device.tier == Cuda.tier else ""
    parts = len(getattr(model.model.get_output_embeddings(), "parts", ()))
    head = f", {parts} of them parts of the head" if parts else ""
    return f"{on_device}{where.dram} layers in DRAM, {where.storage} on disk{head} ({model.mode} reads)"


def _neurons(model: "OffloadedModel", strategy: ByNeuron) -> str:
    stores = [ffn.store for ffn in strategy.ffns]
    share = sum(store.num_used for store in stores) / sum(store.residency.units for store in stores)
    hot = sum(int(mask.sum()) for mask in strategy.hot) / sum(map(len, strategy.hot))
    on_device = f"{hot:.0%} of the neurons on the device, " if model.device.tier == Cuda.tier else ""
    computed = "held" if strategy.ffns[0].computes_held else "predicted"
    return f"{on_device}{share:.0%} of the neurons in DRAM ({model.mode} reads), computed with the {computed} ones"


def _experts(model: "OffloadedModel", strategy: ByExpert) -> str:
    caches = [ffn.slots.cache for ffn in strategy.ffns]
    room = sum(cache.slots for cache in caches) / sum(cache.experts for cache in caches)
    needed, late = (sum(getattr(cache.of_experts, name) for cache in caches) for name in ("needed", "late"))
    hits = f"{1 - late / max(needed, 1):.0%} of the experts were there when needed"
    return f"DRAM for {room:.0%} of the experts ({model.mode} reads), {hits}"
