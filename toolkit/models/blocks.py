"""The decoder blocks of a model and their linear layers.

Embeddings and the output head (often one tied matrix) are not part of the blocks: pruning leaves them alone.
"""

import torch
from torch import nn

from toolkit.errors import UserError


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder's blocks in order, as the model holds them. Raises `UserError` if the model has no such list."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = model.config.get_text_config().num_hidden_layers
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    blocks = next(lists, None)  # modules() yields outer modules first, so this is the outermost list
    if blocks is None:
        raise UserError(f"{type(model).__name__} has no list of {count} decoder blocks; choose a decoder-only model")
    return blocks


def decoder_linears(block: nn.Module) -> dict[str, nn.Linear]:
    """A block's linear layers by their dotted name inside it, each with a plain floating-point weight (out × in).

    Raises `UserError` if the block holds matrices of another kind (experts fused into one 3-D parameter, GPT-2's
    transposed Conv1D, weights still quantised), which a walk over `nn.Linear` would miss without a word.
    """
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    weights = {f"{name}.weight" for name in linears}
    for name, parameter in block.named_parameters():
        plain = parameter.is_floating_point() and parameter.element_size() > 1
        if parameter.ndim > 1 and not (name in weights and plain):
            raise UserError(
                f"{type(block).__name__}.{name} ({str(parameter.dtype).removeprefix('torch.')}, "
                f"{' × '.join(map(str, parameter.shape))}) is not the floating-point weight of an nn.Linear (but of "
                "fused experts, a Conv1D or a state-space layer, or quantised); choose a dense model such as "
                "smollm2-135m, OPT or Llama; --method experts packs some mixtures of experts, such as Mixtral"
            )
    return linears


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model's parameters, in place. Its buffers stay: angles of rotary embeddings are float32 in any case."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
