"""Activation sparsity: thresholds that set small activations to zero, and records of which neurons fire."""

from toolkit.activations.recording import record
from toolkit.activations.shares import share_out
from toolkit.activations.thresholds import Magnitudes, thresholded
from toolkit.activations.trace import Trace
from toolkit.models.cutting import thresholds_of

__all__ = ["Magnitudes", "Trace", "record", "share_out", "thresholded", "thresholds_of"]
