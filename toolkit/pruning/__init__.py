"""Pruning of decoder linears: `prune` works in place, `METHODS` is the registry, `load_pruned` keeps pruned models."""

from toolkit.pruning.layerwise import METHODS, LayerStatistics, prune
from toolkit.pruning.pruned import load_pruned

__all__ = ["METHODS", "LayerStatistics", "load_pruned", "prune"]
