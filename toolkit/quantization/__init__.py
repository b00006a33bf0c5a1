"""Fewer bits per weight: `smoothquant` prepares a model for int8 with one scale per row (`toolkit.absmax`)."""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.absmax import absmax_int8, dequantise, row_scales
    from toolkit.quantization import neuron_records, outliers
    from toolkit.quantization.hqq import Groupwise
    from toolkit.quantization.spqr import SpQR
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Groupwise", "SpQR", "absmax_int8", "dequantise", "neuron_records", "outliers", "row_scales"]
