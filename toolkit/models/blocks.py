"""The decoder blocks of a model and their linear layers.

Embeddings and the output head (often one tied matrix) are not part of the blocks: pruning leaves them alone.
"""

import re
from collections.abc import Iterator
from functools import cache
from itertools import chain

import torch
from torch import nn

from toolkit.errors import UserError


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder's blocks in order, as the model holds them. Raises `UserError` if the model has no such list.

    Their list is as long as the configuration says. Some configurations count attentions, of which LongCat-Flash has
    two a block; then it is the first list of modules that transformers marks as blocks.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = model.config.get_text_config().num_hidden_layers

    def lists() -> Iterator[nn.ModuleList]:
        """Outer ones come first; nearly always it is the first, so the others are not looked for."""
        return (it for it in chain(decoder.modules(), model.modules()) if isinstance(it, nn.ModuleList))

    marked = (each for each in lists() if len(each) and all(map(_is_block, each)))
    blocks = next((each for each in lists() if len(each) == count), None) or next(marked, None)
    if blocks is None:
        raise UserError(f"{type(model).__name__} has no list of {count} decoder blocks; choose a decoder-only model")
    return blocks


def _is_block(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def decoder_linears(block: nn.Module) -> dict[str, nn.Linear]:
    """A block's linear layers by their dotted name inside it, each with a floating-point weight (out × in).

    Among them are those of experts (`toolkit.models.plain`). A gate with a single output is left out, since it is as
    small as a norm. All other tensors of a block, such as experts in a form of their own, are no linears, and stay in
    memory. Raises `UserError` for a block without linears, or with weights that are still quantised.
    """
    for name, parameter in block.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() == 1:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"{type(block).__name__}.{name} is quantised ({kind}); choose the model that it was made of"
            )
    if not (linears := linears_in(block)):
        raise UserError(f"{type(block).__name__} has no linear layers; choose a decoder such as Llama")
    return linears


def linears_in(block: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a module as `decoder_linears` tells them, also if there are none."""
    return {name: it for name, it in block.named_modules() if _is_linear(it) and it.out_features > 1}


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or (isinstance(module, nn.Linear) and _multiplies(type(module)))


@cache
def _multiplies(kind: type[nn.Linear]) -> bool:
    """Whether a class of linears only multiplies. Some routers derive from `nn.Linear` and return more."""
    with torch.device("cpu"):
        linear, x = nn.Linear(4, 3), torch.linspace(-1, 1, 8).view(2, 4)
    try:
        given = kind.forward(linear, x)
    except Exception:  # it is more than a linear
        return False
    return isinstance(given, torch.Tensor) and torch.allclose(given, linear(x), atol=1e-6)


def replace_module(root: nn.Module, module: nn.Module, ours: nn.Module) -> None:
    """Put a module in the place of one inside `root`."""
    root.set_submodule(next(name for name, it in root.named_modules() if it is module), ours)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model's parameters, in place, but for those that transformers keeps in float32 beside this type.

    Its buffers stay: angles of rotary embeddings are float32 in any case.
    """
    kept = kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if kept.search(name) else dtype)


def kept_in_float32(model: nn.Module, dtype: torch.dtype) -> re.Pattern:
    """A pattern of the names of tensors that transformers keeps in float32 where a model has another type."""
    plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    return re.compile("|".join(pattern.replace("*", ".*") for pattern in plan) or "(?!)")  # none without a plan
