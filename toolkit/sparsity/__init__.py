"""Weights and activations that are zero.

`prune` sets weights to zero in place, by the methods of `METHODS`; `load_pruned` and `load_changed` keep such models.
`thresholded` sets small activations to zero; `record` keeps which neurons fire, as a `Trace`.
"""

from toolkit.models.cutting import thresholds_of
from toolkit.sparsity.calibration import Calibration
from toolkit.sparsity.changed import load_changed, load_pruned
from toolkit.sparsity.layerwise import LayerStatistics, prune
from toolkit.sparsity.methods import METHODS
from toolkit.sparsity.recording import record
from toolkit.sparsity.shares import share_out
from toolkit.sparsity.thresholds import Magnitudes, thresholded
from toolkit.sparsity.trace import Trace

__all__ = [
    "METHODS",
    "Calibration",
    "LayerStatistics",
    "Magnitudes",
    "Trace",
    "load_changed",
    "load_pruned",
    "prune",
    "record",
    "share_out",
    "thresholded",
    "thresholds_of",
]
