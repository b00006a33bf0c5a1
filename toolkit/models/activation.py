"""The activation function of a model's FFNs, by the name that its configuration gives it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import UserError, unknown

ENTRIES = ("hidden_act", "activation_function", "hidden_activation", "activation")  # of a configuration
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function; it maps 0 to 0. Raises `UserError` for an unknown name."""
    if name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def activation_name(model: nn.Module) -> str:
    """What the configuration of a model calls it. Raises `UserError` if it says nothing, or an unknown name."""
    config = model.config.get_text_config()
    name = next((found for entry in ENTRIES if isinstance(found := getattr(config, entry, None), str)), None)
    if name is None:
        raise UserError(f"{type(model).__name__}: its configuration names no activation; expected {', '.join(ENTRIES)}")
    activation(name)
    return name
