"""A dense FFN split into experts: shared neurons, which every token uses, and routed groups of equal size.

    save("split.safetensors", dense, SplitParts(permutation, router, shared=192, per_token=8), {"model": "tiny"})
    split_from(load_dense(), "split.safetensors")

The output is the sum of the shared part and of the
chosen experts, each with a weight of 1, so with all experts it is the dense FFN's. The model's config says how its FFNs
are split, in the entry `split_mixture`; `load_model` and `toolkit.models.skeleton` form the modules when it is there.
Any other program reads the folder as a dense model whose FFN weights are missing.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.adapters import (
    LowRankDifference,
    add_differences,
    differences_in,
    load_parts,
    save_parts,
    stored,
)
from toolkit.models.blocks import decoder_blocks
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.models.plain import Expert, Inner, RoutedExperts

ENTRY = "split_mixture"  # of a model's config
SIZES = ("experts", "neurons", "shared", "per_token")  # its numbers; `neurons` of one routed expert
FILE = "split.safetensors"  # in the folder of a split model
KIND = "parts of a split model"
PERMUTATION, ROUTER = "permutation", "router"


@dataclass(frozen=True, eq=False)
class SplitParts:
    """The tensors and numbers that turn a dense model into a split one."""

    permutation: Int64[Tensor, "layers neurons"]
    """The neurons of each layer in their new order: the shared ones, then expert after expert."""
    router: Float[Tensor, "layers experts hidden"]
    shared: int
    """Neurons that every token uses."""
    per_token: int
    """Routed experts that a token uses."""
    differences: Mapping[str, LowRankDifference] = field(default_factory=dict)
    """Added to the dense model's decoder linears first."""


def save(path: str | os.PathLike, base: nn.Module, parts: SplitParts, about: Mapping[str, str]) -> None:
    """Replace a file by the parts for a dense model: int16, and bf16. Raises `UserError` for disk trouble."""
    numbers = {"shared": str(parts.shared), "per_token": str(parts.per_token)}
    tensors = {PERMUTATION: parts.permutation.short(), ROUTER: parts.router.bfloat16(), **stored(parts.differences)}
    save_parts(path, KIND, base, tensors, {**about, **numbers})


def load(path: str | os.PathLike, base: nn.Module) -> SplitParts:
    """The parts of a file for this dense model, the numbers as float32. Raises `UserError` as `load_parts` does."""
    about, tensors = load_parts(path, KIND, base)
    permutation, router = tensors.pop(PERMUTATION).long(), tensors.pop(ROUTER)
    return SplitParts(permutation, router, int(about["shared"]), int(about["per_token"]), differences_in(tensors))


def split_from(model: nn.Module, path: str | os.PathLike) -> None:
    """Split a dense model, in place, by the parts of a file. Raises `UserError` as `load` and `split` do."""
    split(model, load(path, model))


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
        self.gate, self.act_fn = SplitRouter(experts, hidden, per_token), act_fn
        linears = [
            (nn.Linear(hidden, 2 * neurons, bias=False), nn.Linear(neurons, hidden, bias=False)) for _ in range(experts)
        ]
        self.experts = RoutedExperts([Expert(*pair) for pair in linears], Inner(act_fn))
        self.shared_expert = SharedProjections(shared, hidden)

    def forward(self, x: Float[Tensor, "*places hidden"]) -> Float[Tensor, "*places hidden"]:
        """The output of the shared neurons, and of the experts that each token uses."""
        flat, shared = x.reshape(-1, x.shape[-1]), self.shared_expert
        ids = self.gate(flat)
        routed = self.experts(flat, ids, torch.ones_like(ids, dtype=x.dtype))
        total = shared.down_proj(self.act_fn(shared.gate_proj(flat)) * shared.up_proj(flat)) + routed
        return total.view(x.shape)


@torch.no_grad()
def split(model: nn.Module, parts: SplitParts) -> None:
    """Add the differences to a dense model and split its FFNs, in place, and say so in its config.

    Raises `UserError` for a model without gated FFNs of one size that the experts share out.
    """
    ffns = decoder_ffns(model)
    check_gated(ffns)
    total, experts = ffns[0].neurons, parts.router.shape[1]
    sizes = {"experts": experts, "neurons": (total - parts.shared) // experts, "shared": parts.shared}
    sizes = _checked(sizes | {"per_token": parts.per_token}, total)
    add_differences(model, parts.differences)
    setattr(model.config, ENTRY, sizes)
    _replace(model, ffns, sizes)
    for block, *own in zip(decoder_blocks(model), ffns, parts.permutation, parts.router, strict=True):
        mixture = next(module for module in block.modules() if isinstance(module, SplitMixture))
        _fill(mixture, *own)


def check_gated(ffns: Sequence[FFN]) -> None:
    """Raise `UserError` for an FFN without a gate, or with biases."""
    if any(ffn.gate is None or any(linear.bias is not None for linear in ffn.linears) for ffn in ffns):
        raise UserError("only gated FFNs without biases are split")


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
    if sizes["per_token"] > sizes["experts"]:
        raise UserError(f"{sizes['per_token']} routed experts a token: expected 1 to {sizes['experts']}")
    return sizes


def _replace(model: nn.Module, ffns: Sequence[FFN], sizes: dict[str, int]) -> None:
    """Put empty mixtures in the place of the modules that hold the FFNs."""
    for block, ffn in zip(decoder_blocks(model), ffns, strict=True):
        name, holder = next((name, it) for name, it in block.named_modules() if ffn.down in it.children())
        mixture = SplitMixture(ffn.down.out_features, holder.act_fn, **sizes)
        parent, _, attribute = name.rpartition(".")
        like = ffn.down.weight
        setattr(block.get_submodule(parent), attribute, mixture.to(device=like.device, dtype=like.dtype))


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
