"""Weights and activations that are zero.

`prune` sets weights to zero in place, by the methods of `METHODS`; `load_pruned` and `load_changed` keep such models.
`thresholded` sets small activations to zero; `record` keeps which neurons fire, as a `Trace`.
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.models.cutting import thresholds_of
    from toolkit.sparsity import statistics, trace
    from toolkit.sparsity.calibration import Calibration, cut_windows
    from toolkit.sparsity.changed import load_changed, load_pruned
    from toolkit.sparsity.layerwise import LayerStatistics, prune
    from toolkit.sparsity.methods import METHODS
    from toolkit.sparsity.recording import mixtures, record
    from toolkit.sparsity.route_traces import load_route_trace
    from toolkit.sparsity.shares import share_out
    from toolkit.sparsity.statistics import aggregated_usage, overlap, usage_of
    from toolkit.sparsity.synthetic import BetaLaw, Drift, UsageLaw, draw, draw_layers
    from toolkit.sparsity.thresholds import CRITERIA, Magnitudes, run_decoder, thresholded
    from toolkit.sparsity.trace import Trace
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CRITERIA",
    "METHODS",
    "BetaLaw",
    "Calibration",
    "Drift",
    "LayerStatistics",
    "Magnitudes",
    "Trace",
    "UsageLaw",
    "aggregated_usage",
    "cut_windows",
    "draw",
    "draw_layers",
    "load_changed",
    "load_pruned",
    "load_route_trace",
    "mixtures",
    "overlap",
    "prune",
    "record",
    "run_decoder",
    "share_out",
    "statistics",
    "thresholded",
    "thresholds_of",
    "trace",
    "usage_of",
]
