"""Whether FFNs and mixtures compute what takes their place when they are stored by neuron or by expert.

That computes with the weights alone: `down(act(gate(x)) · up(x))`, and for a mixture the sum of its experts. A model
may add a norm before the down projection (BitNet), a clamp or a scale. Both are run on random input, small and large.
"""

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.activation import Function, activation, activation_name
from toolkit.models.blocks import decoder_blocks
from toolkit.models.experts import Experts, SharedFFN, mixtures_by_layer
from toolkit.models.ffn import FFN, decoder_ffns

SCALES = (1.0, 1.0, 4.0, 16.0)  # of the values of each token; clamps show at large ones
ROUNDING = 0.05  # of the norm of a token's output


@torch.no_grad()
def check_ffns(model: nn.Module) -> None:
    """Raise `UserError`, with the block's number, unless each FFN of a model is two or three linears and no more.

    An FFN that is no module of its own (OPT's) cannot be run by itself, and is not checked. Raises what `decoder_ffns`
    and `activation_name` raise, too.
    """
    ffns, act = decoder_ffns(model), activation(activation_name(model))
    for number, (block, ffn) in enumerate(zip(decoder_blocks(model), ffns, strict=True)):
        module = next(module for module in block.modules() if ffn.down in module.children())
        if module is not block:
            x = _tokens(ffn.up.in_features, ffn.up.weight)
            _compare(f"block {number}: its FFN", module, x, _ffn(ffn, act, x))


@torch.no_grad()
def check_mixtures(model: nn.Module) -> None:
    """Raise `UserError`, with the block's number, unless each mixture of a model is the weighted sum of its experts.

    Raises what `mixtures_by_layer` and `activation_name` raise, too.
    """
    mixtures, act = mixtures_by_layer(model), activation(activation_name(model))
    for number, experts in mixtures.items():
        x = _tokens(experts.hidden, experts.down)
        _compare(f"block {number}: its mixture of experts", experts.module, x, _mixture(experts, act, x))


def _tokens(hidden: int, like: Tensor) -> Float[Tensor, "tokens hidden"]:
    values = torch.randn(len(SCALES), hidden, generator=torch.Generator().manual_seed(0))
    return (values * torch.tensor(SCALES)[:, None]).to(like)


def _compare(place: str, module: nn.Module, x: Tensor, expected: Float[Tensor, "tokens hidden"]) -> None:
    """Raise `UserError` unless a module gives the expected output, which is compared token by token."""
    name = type(module).__name__
    try:
        output = module(x[None])
    except TypeError as error:  # it takes more than its input
        raise UserError(f"{place} ({name}) cannot be replaced: {error}; choose another method of packing") from error
    if not isinstance(output, Tensor):
        raise UserError(f"{place} ({name}) gives more than its output; choose another method of packing")
    errors, sizes = (output[0].float() - expected.float()).norm(dim=-1), expected.float().norm(dim=-1)
    if not (errors <= ROUNDING * sizes).all():
        raise UserError(
            f"{place} ({name}) is more than its linears and their activation, which give an output that is off by "
            f"{float((errors / sizes).max()):.0%}; choose another method of packing"
        )


def _ffn(ffn: FFN, act: Function, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
    """The output of an FFN stored by neuron. Thresholds of the model are hooks of `down`."""
    return ffn.down(act(ffn.up(x)) if ffn.gate is None else act(ffn.gate(x)) * ffn.up(x))


def _mixture(experts: Experts, act: Function, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens hidden"]:
    """The output of a mixture stored by expert."""
    total = torch.zeros(x.shape) if experts.shared is None else _shared(experts.shared, act, x)
    ids, weights = experts.route(x)
    for token, rank in np.ndindex(*ids.shape):
        gate, up, down = experts.matrices(ids[token, rank])
        output = (act(gate @ x[token]) * (up @ x[token])) @ down
        total[token] += weights[token, rank] * output.float()
    return total


def _shared(shared: SharedFFN, act: Function, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens hidden"]:
    gated = act(functional.linear(x, shared.gate)) * functional.linear(x, shared.up)
    output = functional.linear(gated, shared.down).float()
    return output if shared.share is None else output * torch.sigmoid(functional.linear(x, shared.share).float())
