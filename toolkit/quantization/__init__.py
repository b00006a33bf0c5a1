"""Fewer bits a weight: int8 with a scale a row (`absmax`), made easier by `smoothquant`."""

from toolkit.quantization.absmax import absmax_int8, dequantise, row_scales

__all__ = ["absmax_int8", "dequantise", "row_scales"]
