"""Adapters that make a dense model sparse: low-rank differences of its decoder linears, and its thresholds, in a file.

    save("adapters.safetensors", dense, Adapters(lows, thresholds), {"model": "smollm2-135m", "text": "..."})
    merge(load_dense(), "adapters.safetensors")

The weight of a linear becomes W + left · right (LoRA: Hu et al., 2022). Thresholds: see `toolkit.models.cutting`.
Adapters may be made for another activation than the model's own, such as ReLU for SiLU.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.models.activation import activation, replace_for_good
from toolkit.models.blocks import decoder_blocks, decoder_linears
from toolkit.models.cutting import ENTRY, thresholds_of
from toolkit.models.ffn import decoder_ffns
from toolkit.records import line

FILE = "adapters.safetensors"  # in the folder of a sparse model
KIND = "adapters of a sparse model"
BASE = "base_sha256"
THRESHOLDS, ACTIVATION = "thresholds", "activation"


@dataclass(frozen=True)
class LowRankDifference:
    """The difference left · right of a matrix."""

    left: Float[Tensor, "rows rank"]
    right: Float[Tensor, "rank columns"]


@dataclass(frozen=True, eq=False)
class Adapters:
    """Differences of linears, by their dotted name in the model, and the threshold of each decoder block."""

    differences: Mapping[str, LowRankDifference]
    thresholds: Float32[Tensor, " layers"]
    activation: str | None = None
    """The activation in place of the model's own, such as "relu"; None keeps it."""


def named_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every decoder linear with its dotted name in the model."""
    names = {module: name for name, module in model.named_modules()}
    for block in decoder_blocks(model):
        for linear in decoder_linears(block).values():
            yield names[linear], linear


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, shapes and first rows (as bf16) of the decoder linears: which dense model this is."""
    digest = hashlib.sha256()
    for name, linear in named_linears(model):
        digest.update(f"{name} {list(linear.weight.shape)}".encode())
        digest.update(linear.weight[0].bfloat16().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def save(path: str | os.PathLike, base: nn.Module, adapters: Adapters, about: Mapping[str, str]) -> None:
    """Replace a file by adapters for a dense model, the differences as bf16. Raises `UserError` for disk trouble."""
    tensors = {THRESHOLDS: adapters.thresholds.float(), **stored(adapters.differences)}
    described = {**about, BASE: fingerprint(base)} | ({ACTIVATION: adapters.activation} if adapters.activation else {})
    tensor_files.save(path, KIND, described, tensors)


@torch.no_grad()
def merge(model: nn.Module, path: str | os.PathLike) -> None:
    """Add the differences of a file to a dense model's weights, in place, and write its thresholds into the config.

    Raises `UserError`, before anything changes, for a file that is damaged, of another kind or for another model.
    """
    if thresholds_of(model) is not None:
        raise UserError(f"{path}: the model has activation thresholds already; load its dense model")
    add(model, load(path, model))


@torch.no_grad()
def add(model: nn.Module, adapters: Adapters) -> None:
    """Add differences to a model's weights, in place, and put thresholds and activation into its config."""
    if adapters.activation is not None:
        replace_for_good(model, adapters.activation)
    add_differences(model, adapters.differences)
    setattr(model.config, ENTRY, adapters.thresholds.tolist())


@torch.no_grad()
def add_differences(model: nn.Module, differences: Mapping[str, LowRankDifference]) -> None:
    """Add differences to a model's weights, in place."""
    linears = dict(named_linears(model))
    for name, low in differences.items():
        weight = linears[name].weight
        weight.copy_(weight.float() + low.left.to(weight.device) @ low.right.to(weight.device))


def load(path: str | os.PathLike, base: nn.Module) -> Adapters:
    """The adapters of a file, as float32, for this dense model. Raises `UserError` as `merge` does."""
    about, tensors = tensor_files.load(path, KIND)
    if about.get(BASE) != fingerprint(base):
        made_for = line(about.get("model"))
        raise UserError(f"{path}: made for another model ({made_for}); load that one, or make adapters anew")
    with tensor_files.consistent(path, KIND):
        thresholds = tensors.pop(THRESHOLDS)
        pairs = differences_in(tensors)
        check_differences(base, pairs)
        if thresholds.shape != (len(decoder_ffns(base)),) or not (thresholds >= 0).all():
            raise ValueError(
                f"{thresholds.numel()} thresholds do not fit the model: expected one of at least 0 a layer"
            )
        if (name := about.get(ACTIVATION)) is not None:
            activation(name)
        return Adapters(pairs, thresholds.float(), name)


def said_about(path: str | os.PathLike) -> dict[str, str]:
    """The description that `save` wrote into a file. Raises `UserError` for one that is damaged or no adapters'."""
    return tensor_files.load(path, KIND)[0]


def stored(differences: Mapping[str, LowRankDifference]) -> dict[str, Tensor]:
    """Differences as the tensors of a file, in bf16."""
    sides = ("left", "right")
    return {f"{name}.{side}": getattr(low, side).bfloat16() for name, low in differences.items() for side in sides}


def differences_in(tensors: Mapping[str, Tensor]) -> dict[str, LowRankDifference]:
    """Differences, as float32, from the tensors of a file that are theirs. Raises `KeyError` if one lacks a side."""
    names = sorted({name.rpartition(".")[0] for name in tensors})
    return {
        name: LowRankDifference(tensors[f"{name}.left"].float(), tensors[f"{name}.right"].float()) for name in names
    }


def check_differences(base: nn.Module, pairs: Mapping[str, LowRankDifference]) -> None:
    """Raise `ValueError` for differences that do not fit the model, or whose sums may overflow."""
    linears = dict(named_linears(base))
    for name, low in pairs.items():
        fits = low.left.ndim == low.right.ndim == 2 and low.left.shape[1] == low.right.shape[0]
        if name not in linears or not fits or (len(low.left), low.right.shape[1]) != linears[name].weight.shape:
            raise ValueError(f"the difference of {name} does not fit the model")
        dtype, most = linears[name].weight.dtype, low.left.abs() @ low.right.abs().amax(1)
        if (most > torch.finfo(dtype).max / 2).any():
            raise ValueError(f"the difference of {name} is too large for the model's {dtype}")
