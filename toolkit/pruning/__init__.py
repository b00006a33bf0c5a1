"""Pruning in place (`prune`, by the methods of `METHODS`), and models that are kept, pruned or quantised."""

from toolkit.pruning.calibration import Calibration
from toolkit.pruning.changed import load_changed, load_pruned
from toolkit.pruning.layerwise import LayerStatistics, prune
from toolkit.pruning.methods import METHODS

__all__ = ["METHODS", "Calibration", "LayerStatistics", "load_changed", "load_pruned", "prune"]
