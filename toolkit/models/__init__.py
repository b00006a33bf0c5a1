"""Models: load one by name, find the linear layers of its decoder blocks, or make a random twin of its shapes."""

from toolkit.models.blocks import decoder_blocks, decoder_linears
from toolkit.models.loading import MODELS, Model, check_model, fast_dtype, load_model
from toolkit.models.shapes import SHAPES, random_pruned

__all__ = [
    "MODELS",
    "SHAPES",
    "Model",
    "check_model",
    "decoder_blocks",
    "decoder_linears",
    "fast_dtype",
    "load_model",
    "random_pruned",
]
