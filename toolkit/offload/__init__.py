"""The runtime: weights that live on disk, in DRAM or on a GPU, and what brings them to the device that computes."""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.offload.budget import BudgetError
    from toolkit.offload.methods import ACCELERATE, METHODS, PACKED, RIVALS
    from toolkit.offload.model import OffloadedModel
    from toolkit.offload.neuron_store import NeuronStore
    from toolkit.offload.options import Demand
    from toolkit.offload.placement import LayerMap, fitting
    from toolkit.offload.ways import DEVICES, PATHS, POLICIES, Way, all_ways
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ACCELERATE",
    "DEVICES",
    "METHODS",
    "PACKED",
    "PATHS",
    "POLICIES",
    "RIVALS",
    "BudgetError",
    "Demand",
    "LayerMap",
    "NeuronStore",
    "OffloadedModel",
    "Way",
    "all_ways",
    "fitting",
]
