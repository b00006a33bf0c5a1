"""The activation function of a model's FFNs, by the name that its configuration gives it, and another in its place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import UserError, unknown
from toolkit.models.blocks import decoder_blocks

ENTRIES = ("hidden_act", "activation_function", "hidden_activation", "activation")  # of a configuration
ATTRIBUTES = ("act_fn", "activation_fn", "act")  # of the module in a block that has the activation
Function = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Function] = {
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def activation(name: str) -> Function:
    """The function; it maps 0 to 0. Raises `UserError` for an unknown name."""
    if name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def name_of(function: Function) -> str | None:
    """The name of an activation function, found by its values; None for an unknown one."""
    values = torch.cat([torch.linspace(-8, 8, 65, device="cpu"), torch.tensor([-40.0, 40.0], device="cpu")])
    given = function(values)
    return next((name for name, known in ACTIVATIONS.items() if torch.allclose(known(values), given, atol=1e-5)), None)


def activation_name(model: nn.Module) -> str:
    """The activation's name in a model's configuration. Raises `UserError` for a missing or unknown name."""
    return next(iter(_entries(model).values()))


@contextmanager
def replaced(model: nn.Module, activations: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Inside the block, each decoder block has another activation; the model's configuration still names its own.

    Raises `UserError` for another number of activations than blocks, or a block without a known one.
    """
    holders = _holders(model)
    if len(activations) != len(holders):
        raise UserError(f"{len(activations)} activations for {len(holders)} decoder blocks: they are another model's")
    kept = [getattr(*holder) for holder in holders]
    try:
        for holder, found in zip(holders, activations, strict=True):
            setattr(*holder, found)
        yield model
    finally:
        for holder, found in zip(holders, kept, strict=True):
            setattr(*holder, found)


def _entries(model: nn.Module) -> dict[str, str]:
    """The entries of the configuration that name an activation; the first one counts."""
    config = model.config.get_text_config()
    found = {entry: name for entry in ENTRIES if isinstance(name := getattr(config, entry, None), str)}
    if not found:
        raise UserError(f"{type(model).__name__}: its configuration names no activation; expected {', '.join(ENTRIES)}")
    activation(next(iter(found.values())))
    return found


def _holders(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [_holder(block, number) for number, block in enumerate(decoder_blocks(model))]


def _holder(block: nn.Module, number: int) -> tuple[nn.Module, str]:
    """The module in a block that has the activation, and its attribute."""
    for module in block.modules():
        for name in ATTRIBUTES:
            if callable(getattr(module, name, None)):
                return module, name
    raise UserError(f"block {number} has no activation named {', '.join(ATTRIBUTES)}; add its name to ATTRIBUTES")
