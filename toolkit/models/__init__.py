"""Models: load one by name, find the linear layers of its decoder blocks, or make a random twin of its shapes.

Modules that need torch are imported at first use: the headers of GGUF files are read without it.
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.models.activation import activation_name, replaced
    from toolkit.models.architectures import ARCHITECTURES
    from toolkit.models.blocks import decoder_blocks, decoder_linears
    from toolkit.models.cutting import attached
    from toolkit.models.dtype import fast_dtype
    from toolkit.models.experts import TopK, block_experts
    from toolkit.models.ffn import decoder_ffns
    from toolkit.models.loading import check_model, load_model
    from toolkit.models.named import MODELS, Model, gguf_file
    from toolkit.models.shapes import SHAPES, neuron_bytes, part_bytes, random_pruned, twin_shapes
    from toolkit.models.twins import twin_model
    from toolkit.models.workload import Workload
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ARCHITECTURES",
    "MODELS",
    "SHAPES",
    "Model",
    "TopK",
    "Workload",
    "activation_name",
    "attached",
    "block_experts",
    "check_model",
    "decoder_blocks",
    "decoder_ffns",
    "decoder_linears",
    "fast_dtype",
    "gguf_file",
    "load_model",
    "neuron_bytes",
    "part_bytes",
    "random_pruned",
    "replaced",
    "twin_model",
    "twin_shapes",
]
