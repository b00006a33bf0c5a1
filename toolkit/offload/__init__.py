"""The runtime: weights that live on disk, in DRAM or on a GPU, and what brings them to the device that computes.

From the disk to the product:

- a packed folder: `toolkit.storage` reads a layer into a slot (`cache`), `streamer` brings layers in time, `linear`
  multiplies a matrix packed or decoded; `single_token` does it for one token
- a GGUF file: `decoder` reads and multiplies its blocks without torch (`toolkit.kernels.blocks`); for models that it
  does not know, `toolkit.storage.gguf_store` is the file as a store, and the rest is as for a folder
- `model` opens either with torch, `decoder.model_file` a file without it; `by_neuron` and `by_expert` read a part of a
  layer; `placement` says which layers stay in memory, `overhead` how many bytes of a limit weights may take
"""

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
