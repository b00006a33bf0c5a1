"""Pruning of decoder linears: `prune` works in place, `METHODS` is the registry, `load_pruned` keeps pruned models."""

from toolkit.pruning.calibration import Calibration
from toolkit.pruning.layerwise import LayerStatistics, prune
from toolkit.pruning.methods import METHODS
from toolkit.pruning.pruned import load_pruned

__all__ = ["METHODS", "Calibration", "LayerStatistics", "load_pruned", "prune"]
