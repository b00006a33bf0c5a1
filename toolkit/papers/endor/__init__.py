"""ENDOR: pruned weights as a bitmap and their non-zeros, streamed from disk through DRAM to the GPU.

The idea: offloading is bound by bytes over links. Half of the weights are zeros after pruning, so a bitmap with the
other half passes a link in 0.56 of the time, if decoding costs nothing beside the transfer.

Begin with `notebooks/endor/fig04_format_size`, then `tab_e2e_one_pass`. The format itself is the engine's
(`toolkit.formats.endor`, `toolkit.kernels.bitmap`), as are methods and placements (`toolkit.offload`).

- `cost_model`: when each weight is read, copied, decoded and used; `tables`: its times as tables
- `operations`: the same, measured: one layer's operations from a store; `rates`: this machine's rates for the model
- `latency`: figures 2 to 16, modelled beside measured; `passes`: whole models, the paper's maps of layers
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.papers.endor.cost_model import PlacedLayer, Weight, predict, weights, with_rates
    from toolkit.papers.endor.latency import layer_headline, layer_times, layer_ways, operation_times, times_by_machine
    from toolkit.papers.endor.operations import labels, measured_spans, spans_of, twin_stores
    from toolkit.papers.endor.passes import MAPS, pairs_table
    from toolkit.papers.endor.rates import this_machine
    from toolkit.papers.endor.tables import layer_of, operation_table, pass_table
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "MAPS",
    "PlacedLayer",
    "Weight",
    "labels",
    "layer_headline",
    "layer_of",
    "layer_times",
    "layer_ways",
    "measured_spans",
    "operation_table",
    "operation_times",
    "pairs_table",
    "pass_table",
    "predict",
    "spans_of",
    "this_machine",
    "times_by_machine",
    "twin_stores",
    "weights",
    "with_rates",
]
