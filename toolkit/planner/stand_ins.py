"""Models packed as a way says, for timing alone: zeros fall at random, and quantised codes are random.

Time does not depend on the values of weights, and calibrating them takes minutes. So a matrix is encoded once for each
shape and stands in for all of that shape. Which neurons fire does depend on values and text: FFNs by neuron are real.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.formats import Packed, encode
from toolkit.formats.scaled import Scaled
from toolkit.formats.spqr import SpQRMatrix
from toolkit.formats.twins import random_spqr
from toolkit.measure.contestant import Contestant, Reference
from toolkit.measure.decoding import Text
from toolkit.measure.llama_cpp import LlamaCpp
from toolkit.measure.packed_model import PackedModel
from toolkit.offload.neuron_folder import write_folder
from toolkit.planner.ways import EXPERTS, INT8, NEURONS, PlannedWay
from toolkit.policies.ways import Way
from toolkit.pruning.calibration import Calibration
from toolkit.storage.experts import pack_experts, pack_mixture_twin
from toolkit.storage.packing import pack_model

POLICY = "pipelined"
TOKEN = 7
CALIBRATION = Calibration(windows=2, sequence_length=128)
CALIBRATED = 256  # tokens


def packed(model: nn.Module, way: PlannedWay, parent: Path, tokens: Tensor | None = None) -> Path:
    """The folder below `parent` with the model as a way stores it; ways that store alike share one."""
    folder = parent / f"{way.kind} {way.stored.format} {way.dtype} {way.sparsity:g} {way.bits:g}"
    if not folder.exists():
        pack(model, way, folder, tokens)
    return folder


def pack(model: nn.Module, way: PlannedWay, folder: Path, tokens: Tensor | None = None) -> None:
    """Write a model in 16 bits as a way of ours stores it. Thresholds of neurons are fitted on `tokens`.

    Raises what `pack_model`, `pack_experts` and `write_folder` raise.
    """
    if way.kind == NEURONS:
        write_folder(model, folder, "stand-in", tokens, way.sparsity, "few_bits", CALIBRATION)
        return
    if way.kind == EXPERTS and way.bits == 16:
        pack_experts(model, folder, "stand-in")
        return
    if way.kind == EXPERTS:
        pack_mixture_twin(model, folder, "stand-in", round(way.bits))
        return
    pack_model(model, folder, {way.stored.format: _packer(way)}, "stand-in")


def _packer(way: PlannedWay) -> Callable[[Tensor], Packed]:
    form, made = way.stored.format, dict[torch.Size, Packed]()

    def encoded(weight: Tensor) -> Packed:
        if form == SpQRMatrix.name:
            return random_spqr(SpQRMatrix, tuple(weight.shape), weight.dtype)
        kept = torch.where(torch.rand(weight.shape) < way.sparsity, 0, weight) if way.sparsity else weight
        return Scaled.encode(form, kept) if way.dtype == INT8 else encode(form, kept)

    def once(weight: Tensor) -> Packed:
        if weight.shape not in made:
            made[weight.shape] = encoded(weight)
        return made[weight.shape]

    return once


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
    run = None if way.kind in (NEURONS, EXPERTS) else Way(way.method, policy=POLICY, device="cpu")
    return PackedModel(way.name, folder, text, labels, run, staged, **settings)


def rival(
    name: str, model: nn.Module, folder: Path, tokens: Sequence[Tensor], labels: dict[str, object]
) -> AbstractContextManager[LlamaCpp]:
    """llama.cpp with a model in memory, as a contestant that is closed afterwards. Raises what `LlamaCpp` raises."""
    return closing(LlamaCpp(name, model, folder, Text(tokens, Reference(name)), labels, mapped=False))
