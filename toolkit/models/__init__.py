"""Models: load one by name, find the linear layers of its decoder blocks, or make a random twin of its shapes.

Modules that need torch are imported at first use: the headers of GGUF files are read without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.models.blocks import decoder_blocks, decoder_linears
    from toolkit.models.dtype import fast_dtype
    from toolkit.models.loading import check_model, load_model
    from toolkit.models.named import MODELS, Model
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
_MODULES = {
    "blocks": ("decoder_blocks", "decoder_linears"),
    "dtype": ("fast_dtype",),
    "loading": ("check_model", "load_model"),
    "named": ("MODELS", "Model"),
    "shapes": ("SHAPES", "random_pruned"),
}


def __getattr__(name: str) -> object:
    """A name of a module that is not imported yet."""
    for place, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
