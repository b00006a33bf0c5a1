"""Low-rank differences of a dense model's linears, and the files that turn a dense model into another one.

    save("adapters.safetensors", dense, Adapters(lows, thresholds), {"model": "smollm2-135m", "text": "..."})
    merge(load_dense(), "adapters.safetensors")

The weight of a linear becomes W + left · right (LoRA: Hu et al., 2022). Adapters make a model sparse: they have a
threshold for each decoder block, too (`toolkit.models.cutting`).
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor, nn

from toolkit import tensor_files
from toolkit.absmax import absmax_int8, row_scales
from toolkit.errors import UserError
from toolkit.models.blocks import decoder_blocks, decoder_linears
from toolkit.models.cutting import ENTRY
from toolkit.records import line

KIND = "adapters of a sparse model"
BASE = "base_sha256"
THRESHOLDS = "thresholds"
SCALES = ".scales"  # after a tensor's name: the name of its scales in a file


class LowRankDifference(NamedTuple):
    """The difference left · right of a matrix."""

    left: Float[Tensor, "rows rank"]
    right: Float[Tensor, "rank columns"]


@dataclass(frozen=True, eq=False)
class Adapters:
    """Differences of linears, by their dotted name in the model, and the threshold of each decoder block."""

    differences: Mapping[str, LowRankDifference]
    thresholds: Float32[Tensor, " layers"]


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


def save_parts(
    path: str | os.PathLike, kind: str, base: nn.Module, tensors: Mapping[str, Tensor], about: Mapping[str, str]
) -> None:
    """Replace a file by the parts that turn a dense model into another one, matrices as `in_int8` gives them.

    Raises `UserError` for disk trouble.
    """
    stored = {}
    for name, tensor in tensors.items():
        stored |= dict(zip((name, name + SCALES), in_int8(tensor), strict=True)) if tensor.ndim > 1 else {name: tensor}
    tensor_files.save(path, kind, {**about, BASE: fingerprint(base)}, stored)


def load_parts(path: str | os.PathLike, kind: str, base: nn.Module) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The description and the tensors of such a file, as float32.

    Raises `UserError` for a file that is damaged, of another kind or for another dense model.
    """
    about, tensors = tensor_files.load(path, kind)
    if about.get(BASE) != fingerprint(base):
        raise UserError(f"{path}: made for another model ({line(about.get('model'))}); load that one, or make it anew")
    scales = {name.removesuffix(SCALES): tensors.pop(name) for name in list(tensors) if name.endswith(SCALES)}
    with tensor_files.consistent(path, kind):
        return about, {name: it.float() * scales.get(name, 1) for name, it in tensors.items()}


def in_int8(matrices: Float[Tensor, "*stack rows columns"]) -> tuple[Int8[Tensor, "*stack rows columns"], Tensor]:
    """Matrices as int8 and float32 scales, whose product they are: one scale for each vector of the longer side.

    So each of the `rank` vectors of a `LowRankDifference` has a scale. Scales have a length of 1 on the longer side.
    Raises `UserError` for numbers that are not finite.
    """
    longer = -1 if matrices.shape[-1] >= matrices.shape[-2] else -2
    vectors = matrices.float().movedim(longer, -1)
    rows = vectors.flatten(0, -2)
    scales = row_scales(rows)
    values = absmax_int8(rows, scales).view(vectors.shape)
    return values.movedim(-1, longer), scales.view(vectors.shape[:-1]).unsqueeze(longer)


def save(path: str | os.PathLike, base: nn.Module, adapters: Adapters, about: Mapping[str, str]) -> None:
    """Replace a file by adapters for a dense model, as `save_parts` does."""
    tensors = {THRESHOLDS: adapters.thresholds.float(), **sides(adapters.differences)}
    save_parts(path, KIND, base, tensors, about)


def load(path: str | os.PathLike, base: nn.Module) -> Adapters:
    """The adapters of a file, as float32, for this dense model. Raises `UserError` as `load_parts` does."""
    _, tensors = load_parts(path, KIND, base)
    thresholds = tensors.pop(THRESHOLDS)
    return Adapters(differences_in(tensors), thresholds)


def merge(model: nn.Module, path: str | os.PathLike) -> None:
    """Add the adapters of a file to a dense model, in place. Raises `UserError`, before that, as `load` does."""
    add(model, load(path, model))


def add(model: nn.Module, adapters: Adapters) -> None:
    """Add differences to a model's weights, in place, and put thresholds into its config."""
    add_differences(model, adapters.differences)
    setattr(model.config, ENTRY, adapters.thresholds.tolist())


@torch.no_grad()
def add_differences(model: nn.Module, differences: Mapping[str, LowRankDifference]) -> None:
    """Add differences to a model's weights, in place."""
    linears = dict(named_linears(model))
    for name, low in differences.items():
        weight = linears[name].weight
        weight.copy_(weight.float() + low.left.to(weight.device) @ low.right.to(weight.device))


def sides(differences: Mapping[str, LowRankDifference]) -> dict[str, Tensor]:
    """The tensors of differences, by name."""
    return {f"{name}.{side}": it for name, low in differences.items() for side, it in low._asdict().items()}


def rounded(matrices: Float[Tensor, "*stack rows columns"]) -> Float32[Tensor, "*stack rows columns"]:
    """Matrices as a file gives them back."""
    values, scales = in_int8(matrices)
    return values.float() * scales


def as_stored(differences: Mapping[str, LowRankDifference]) -> dict[str, LowRankDifference]:
    """Differences as a file gives them back."""
    return {name: LowRankDifference(*map(rounded, low)) for name, low in differences.items()}


def differences_in(tensors: Mapping[str, Tensor]) -> dict[str, LowRankDifference]:
    """Differences from the tensors of a file that are theirs."""
    names = sorted({name.rpartition(".")[0] for name in tensors})
    return {name: LowRankDifference(tensors[f"{name}.left"], tensors[f"{name}.right"]) for name in names}
