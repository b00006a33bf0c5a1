"""Models packed as a way says, for timing alone: zeros fall at random, and quantised codes are random.

Time does not depend on the values of weights, and calibrating them takes minutes.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.formats import Packed, encode
from toolkit.formats.scaled import Scaled
from toolkit.formats.spqr import SpQRMatrix
from toolkit.formats.twins import random_spqr
from toolkit.measure.contestant import Contestant, Reference
from toolkit.measure.decoding import Text
from toolkit.measure.parts_model import PartsModel
from toolkit.measure.streamed import StreamedModel
from toolkit.planner.ways import EXPERTS, INT8, PlannedWay
from toolkit.policies.ways import Way
from toolkit.storage.experts import pack_experts, pack_mixture_twin
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store

POLICY = "pipelined"
TOKEN = 7


def packed(model: nn.Module, way: PlannedWay, parent: Path) -> Path:
    """The folder below `parent` with the model as a way stores it; ways that store alike share one."""
    folder = parent / f"{way.kind} {way.stored.format} {way.dtype} {way.sparsity:g} {way.bits:g}"
    if not folder.exists():
        pack(model, way, folder)
    return folder


def pack(model: nn.Module, way: PlannedWay, folder: Path) -> None:
    """Write a model in 16 bits as a way of ours stores it. Raises what `pack_model` and `pack_experts` raise."""
    if way.kind == EXPERTS and way.bits == 16:
        pack_experts(model, folder, "stand-in")
        return
    if way.kind == EXPERTS:
        pack_mixture_twin(model, folder, "stand-in", round(way.bits))
        return
    pack_model(model, folder, {way.stored.format: _packer(way)}, "stand-in")


def _packer(way: PlannedWay) -> Callable[[Tensor], Packed]:
    form, seeds = way.stored.format, itertools.count()
    if form == SpQRMatrix.name:
        return lambda weight: random_spqr(SpQRMatrix, tuple(weight.shape), weight.dtype, seed=next(seeds))

    def encoded(weight: Tensor) -> Packed:
        kept = torch.where(torch.rand(weight.shape) < way.sparsity, 0, weight) if way.sparsity else weight
        return Scaled.encode(form, kept) if way.dtype == INT8 else encode(form, kept)

    return encoded


def contestant(
    folder: Path,
    way: PlannedWay,
    tokens: Sequence[Tensor],
    labels: dict[str, object],
    staged: bool = True,
    **settings: object,
) -> Contestant:
    """A packed stand-in that takes these tokens, int64 [1, 1] each; `settings` are the runtime's.

    Each turn's logits are compared with those of the first turn: nobody else has the same weights.
    """
    text = Text(tokens, Reference("the turn before"))
    if way.kind == EXPERTS:
        return PartsModel(way.name, folder, text, labels, **settings)
    run = Way(way.method, policy=POLICY, device="cpu")
    return StreamedModel(Store.open(folder), run, text, labels, staged, **settings)
