"""Fewer bits per weight: int8 with one scale per row (`absmax`), and `smoothquant`, which prepares a model for it."""

from toolkit.quantization.absmax import absmax_int8, dequantise, row_scales

__all__ = ["absmax_int8", "dequantise", "row_scales"]
