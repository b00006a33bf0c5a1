"""A dense FFN split into experts: shared neurons, which every token uses, and routed groups of equal size.

The output is the sum of the shared part and of the
chosen experts, each with a weight of 1, so with all experts it is the dense FFN's. The model's config says how its FFNs
are split, in the entry `split_mixture`; `load_model` and `toolkit.models.skeleton` form the modules when it is there.
Any other program reads the folder as a dense model whose FFN weights are missing.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.blocks import decoder_blocks
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.models.plain import Expert, Inner, RoutedExperts

ENTRY = "split_mixture"  # of a model's config
SIZES = ("experts", "neurons", "shared", "per_token")  # its numbers; `neurons` of one routed expert


class SplitRouter(nn.Module):
    """A linear map of the FFN's input: the experts with the highest scores are used."""

    def __init__(self, experts: int, hidden: int, top_k: int):
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.empty(experts, hidden)), top_k

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Int64[Tensor, "tokens k"]:
        """The experts of each token, in falling order of their scores."""
        return functional.linear(x, self.weight).float().topk(self.top_k, dim=-1).indices


class SharedProjections(nn.Module):
    """The linears of the shared neurons."""

    def __init__(self, neurons: int, hidden: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, neurons, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(neurons, hidden, bias=False)


class SplitMixture(nn.Module):
    """In the place of a gated FFN of `experts · neurons + shared` neurons."""

    def __init__(self, hidden: int, act_fn: nn.Module, experts: int, neurons: int, shared: int, per_token: int):
        super().__init__()
        self.gate = SplitRouter(experts, hidden, per_token)
        linears = [
            (nn.Linear(hidden, 2 * neurons, bias=False), nn.Linear(neurons, hidden, bias=False)) for _ in range(experts)
        ]
        self.experts = RoutedExperts([Expert(*pair) for pair in linears], Inner(act_fn))
        self.shared_expert = SharedProjections(shared, hidden)

    def forward(self, x: Float[Tensor, "*places hidden"]) -> Float[Tensor, "*places hidden"]:
        """The output of the shared neurons, and of the experts that each token uses."""
        flat, shared = x.reshape(-1, x.shape[-1]), self.shared_expert
        ids, act_fn = self.gate(flat), self.experts.inner.act_fn
        routed = self.experts(flat, ids, torch.ones_like(ids, dtype=x.dtype))
        total = shared.down_proj(act_fn(shared.gate_proj(flat)) * shared.up_proj(flat)) + routed
        return total.view(x.shape)


@torch.no_grad()
def split(
    model: nn.Module,
    permutation: Sequence[Int64[Tensor, " neurons"]],
    routers: Sequence[Float[Tensor, "experts hidden"]],
    per_token: int,
    shared: int,
) -> None:
    """Split the FFNs of a dense model, in place, and say so in its config.

    Args:
        model: a causal language model with gated FFNs without biases, all of one size.
        permutation: for each layer the neurons in their new order: the shared ones, then expert after expert.
        routers: for each layer a row for each expert.
        per_token: routed experts of a token.
        shared: neurons that every token uses.

    Raises `UserError` before anything changes if these do not fit the model.
    """
    ffns = decoder_ffns(model)
    if len(permutation) != len(ffns) or len(routers) != len(ffns):
        raise UserError(f"{len(permutation)} permutations, {len(routers)} routers for {len(ffns)} decoder blocks")
    for ffn, order in zip(ffns, permutation, strict=True):
        if ffn.gate is None or any(linear.bias is not None for linear in (ffn.gate, ffn.up, ffn.down)):
            raise UserError("only gated FFNs without biases are split")
        if not torch.equal(order.sort().values, torch.arange(ffn.neurons)):
            raise UserError(f"the new order of a layer is no permutation of its {ffn.neurons} neurons")
    experts = len(routers[0])
    sizes = {"experts": experts, "neurons": (ffns[0].neurons - shared) // max(1, experts), "shared": shared}
    sizes = _checked(sizes | {"per_token": per_token}, ffns[0].neurons)
    parts = list(zip(ffns, permutation, routers, strict=True))
    setattr(model.config, ENTRY, sizes)
    _replace(model, ffns, sizes)
    for block, (ffn, order, router) in zip(decoder_blocks(model), parts, strict=True):
        _fill(_mixture(block), ffn, order, router)


def form_mixtures(model: nn.Module) -> None:
    """Put empty mixtures into a model whose config has the entry, unless they are there.

    Raises `UserError` for an entry that does not fit.
    """
    if getattr(model.config, ENTRY, None) is None or any(isinstance(it, SplitMixture) for it in model.modules()):
        return
    ffns = decoder_ffns(model)
    _replace(model, ffns, _checked(getattr(model.config, ENTRY), ffns[0].neurons))


def class_of(config) -> Any:
    """A class that makes the split model of a config, for `from_pretrained`; None for a config without the entry."""
    if getattr(config, ENTRY, None) is None:
        return None
    from transformers import AutoModelForCausalLM

    return _class(AutoModelForCausalLM._model_mapping[type(config)])


def checked_per_token(experts: int, per_token: int) -> int:
    """The routed experts of a token. Raises `UserError` unless they are from 1 to all."""
    if not 1 <= per_token <= experts:
        raise UserError(f"{per_token} routed experts a token: expected 1 to {experts}")
    return per_token


def use_per_token(model: nn.Module, per_token: int) -> None:
    """Have a split model use another number of routed experts a token. Raises `UserError` for one beyond all."""
    sizes = getattr(model.config, ENTRY, None)
    if sizes is None:
        raise UserError(f"{type(model).__name__}: its config has no {ENTRY}; expected a split model")
    setattr(model.config, ENTRY, sizes | {"per_token": checked_per_token(sizes["experts"], per_token)})
    for block in decoder_blocks(model):
        _mixture(block).gate.top_k = per_token


@cache
def _class(base: type) -> type:
    class Split(base):
        def __init__(self, config, *args, **options):
            super().__init__(config, *args, **options)
            form_mixtures(self)

    Split.__name__ = Split.__qualname__ = f"Split{base.__name__}"
    return Split


def _checked(sizes: Any, neurons: int) -> dict[str, int]:
    """The entry of a config, for FFNs with so many neurons."""
    good = isinstance(sizes, dict) and sizes.keys() == set(SIZES)
    if not good or not all(type(size) is int and size > 0 for size in sizes.values()):
        raise UserError(f"{ENTRY} of the model's config: expected whole numbers above 0 for {', '.join(SIZES)}")
    if sizes["experts"] * sizes["neurons"] + sizes["shared"] != neurons:
        raise UserError(
            f"{ENTRY} of the model's config: {sizes['experts']} experts of {sizes['neurons']} neurons and "
            f"{sizes['shared']} shared ones do not make the FFN's {neurons}"
        )
    checked_per_token(sizes["experts"], sizes["per_token"])
    return sizes


def _replace(model: nn.Module, ffns: Sequence[FFN], sizes: dict[str, int]) -> None:
    """Put empty mixtures in the place of the modules that hold the FFNs."""
    for block, ffn in zip(decoder_blocks(model), ffns, strict=True):
        name, holder = next((name, it) for name, it in block.named_modules() if ffn.down in it.children())
        mixture = SplitMixture(ffn.down.out_features, holder.act_fn, **sizes)
        parent, _, attribute = name.rpartition(".")
        like = ffn.down.weight
        setattr(block.get_submodule(parent), attribute, mixture.to(device=like.device, dtype=like.dtype))


def _mixture(block: nn.Module) -> SplitMixture:
    return next(module for module in block.modules() if isinstance(module, SplitMixture))


def _fill(mixture: SplitMixture, ffn: FFN, order: Tensor, router: Tensor) -> None:
    experts, neurons = len(mixture.experts), mixture.experts[0].down.in_features
    shared, routed = order[: len(order) - experts * neurons], order[len(order) - experts * neurons :]
    gate, up, down = ffn.gate.weight, ffn.up.weight, ffn.down.weight
    for linear, weight in zip(
        mixture.shared_expert.children(), (gate[shared], up[shared], down[:, shared]), strict=True
    ):
        linear.weight.copy_(weight)
    groups = routed.view(experts, neurons)
    for expert, neurons in zip(mixture.experts, groups, strict=True):
        expert.up.weight.copy_(torch.cat([gate[neurons], up[neurons]]))
        expert.down.weight.copy_(down[:, neurons])
    mixture.gate.weight.copy_(router)
    mixture.requires_grad_(gate.requires_grad)
