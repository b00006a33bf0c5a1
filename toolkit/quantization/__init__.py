"""Fewer bits a weight: `absmax_int8` so far."""

from toolkit.quantization.absmax import absmax_int8

__all__ = ["absmax_int8"]
