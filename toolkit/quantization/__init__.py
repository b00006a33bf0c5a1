"""Fewer bits per weight: `smoothquant` prepares a model for int8 with one scale per row (`toolkit.absmax`)."""

from toolkit.absmax import absmax_int8, dequantise, row_scales

__all__ = ["absmax_int8", "dequantise", "row_scales"]
