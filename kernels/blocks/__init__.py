"""Blocks of GGUF files: matrices in the types of ggml, multiplied as they lie in the file."""

from toolkit.kernels.blocks.layout import LAYOUTS, PLAIN, Layout

__all__ = ["LAYOUTS", "PLAIN", "Layout"]
