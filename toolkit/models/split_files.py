"""The parts that make a split model of a dense one, in a file: orders of neurons, routers, and low-rank differences.

save("split.safetensors", dense, SplitParts(permutation, router, shared=192, per_token=8), {"model": "smollm2-135m"})
split_from(load_dense(), "split.safetensors")
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.models import mixture
from toolkit.models.adapters import (
    BASE,
    LowRankDifference,
    add_differences,
    check_differences,
    differences_in,
    fingerprint,
    stored,
)
from toolkit.models.ffn import decoder_ffns
from toolkit.records import line

FILE = "split.safetensors"  # in the folder of a split model
KIND = "parts of a split model"
PERMUTATION, ROUTER = "permutation", "router"


@dataclass(frozen=True, eq=False)
class SplitParts:
    """The tensors that make a split model of its dense one: see `toolkit.models.mixture.split`."""

    permutation: Int64[Tensor, "layers neurons"]
    router: Float[Tensor, "layers experts hidden"]
    shared: int
    per_token: int
    differences: Mapping[str, LowRankDifference] = field(default_factory=dict)
    """Added to the dense model's decoder linears first."""


def save(path: str | os.PathLike, base: nn.Module, parts: SplitParts, about: Mapping[str, str]) -> None:
    """Replace a file by the parts for a dense model: int16, and bf16. Raises `UserError` for disk trouble."""
    numbers = {"shared": str(parts.shared), "per_token": str(parts.per_token)}
    tensors = {PERMUTATION: parts.permutation.short(), ROUTER: parts.router.bfloat16(), **stored(parts.differences)}
    tensor_files.save(path, KIND, {**about, **numbers, BASE: fingerprint(base)}, tensors)


def load(path: str | os.PathLike, base: nn.Module) -> SplitParts:
    """The parts of a file for this dense model, the numbers as float32.

    Raises `UserError` for a file that is damaged, of another kind or for another model.
    """
    about, tensors = tensor_files.load(path, KIND)
    if about.get(BASE) != fingerprint(base):
        raise UserError(f"{path}: made for another model ({line(about.get('model'))}); load that one")
    with tensor_files.consistent(path, KIND):
        permutation, router = tensors.pop(PERMUTATION).long(), tensors.pop(ROUTER).float()
        differences = differences_in(tensors)
        check_differences(base, differences)
        ffns = decoder_ffns(base)
        if router.shape[::2] != (len(ffns), ffns[0].down.out_features) or not bool(router.isfinite().all()):
            raise ValueError("its routers do not fit the model")
        return SplitParts(permutation, router, int(about["shared"]), int(about["per_token"]), differences)


@torch.no_grad()
def apply(model: nn.Module, parts: SplitParts) -> None:
    """Add the differences to a dense model and split it, in place. Raises `UserError` as `mixture.split` does."""
    add_differences(model, parts.differences)
    mixture.split(model, list(parts.permutation), list(parts.router), parts.per_token, parts.shared)


def split_from(model: nn.Module, path: str | os.PathLike) -> None:
    """Split a dense model, in place, by the parts of a file. Raises `UserError` as `load` and `apply` do."""
    apply(model, load(path, model))
