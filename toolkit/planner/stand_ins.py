"""Models packed for a way, for timing only: zeros fall at random, and quantised codes are random.

Time does not depend on the values of weights, and calibrating them takes minutes. So a matrix is encoded once for each
shape and stands in for all of that shape. Which neurons fire does depend on values and text: FFNs by neuron are real.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.formats import Packed, encode
from toolkit.formats.scaled import Scaled
from toolkit.formats.spqr import SpQRMatrix
from toolkit.formats.twins import random_spqr
from toolkit.measure.contestant import Text
from toolkit.measure.llama_cpp import LlamaCpp
from toolkit.measure.packed_model import PackedModel
from toolkit.offload.neuron_folder import fit_neurons
from toolkit.offload.ways import Way
from toolkit.planner.ways import EXPERTS, INT8, NEURONS, WHOLE, PlannedWay
from toolkit.sparsity.calibration import Calibration
from toolkit.storage.experts import RandomExperts, WholeExperts
from toolkit.storage.packing import Linears, pack_model

POLICY = "pipelined"
TOKEN = 7
CALIBRATION = Calibration(windows=2, sequence_length=128)
CALIBRATED = 256  # tokens


def contestant(
    model: nn.Module,
    way: PlannedWay,
    parent: Path,
    tokens: Sequence[Tensor],
    labels: dict[str, object],
    calibration: Tensor | None = None,
    **settings: object,
) -> PackedModel:
    """A stand-in that takes these tokens, int64 [1, 1] each; `settings` are those of `PackedModel`.

    It lies in a folder below `parent`, which ways that store alike share. Each turn's logits are compared with those of
    the first turn: nobody else has the same weights. Raises what `pack` raises.
    """
    folder = parent / f"{way.kind} {way.stored.format} {way.dtype} {way.sparsity:g} {way.bits:g} {way.head}"
    if not folder.exists():
        pack(model, way, folder, calibration)
    text = Text(tokens)
    return PackedModel(way.name, folder, text, labels, run_as(way), **settings)


def run_as(way: PlannedWay) -> Way | None:
    """How the runtime calls a way; None for neurons and experts, which it knows by their folder."""
    return None if way.kind in (NEURONS, EXPERTS) else Way(way.method, policy=POLICY, device="cpu")


def rival(
    name: str, model: nn.Module, folder: Path, tokens: Sequence[Tensor], labels: dict[str, object]
) -> AbstractContextManager[LlamaCpp]:
    """llama.cpp with a model in memory, as a contestant that is closed afterwards. Raises what `LlamaCpp` raises."""
    return closing(LlamaCpp(name, model, folder, Text(tokens), labels, load="read"))


def pack(model: nn.Module, way: PlannedWay, folder: Path, tokens: Tensor | None = None) -> None:
    """Write a model in 16 bits as a way of ours stores it. Thresholds of neurons are fitted on `tokens`.

    Raises what `pack_model` and `fit_neurons` raise.
    """
    if way.kind == NEURONS:
        layout, files = fit_neurons(model, "stand-in", tokens, way.sparsity, "few_bits", CALIBRATION)
        pack_model(model, folder, layout, "stand-in", files=files)
    elif way.kind == EXPERTS and way.bits == 16:
        pack_model(model, folder, WholeExperts(), "stand-in")
    elif way.kind == EXPERTS:
        pack_model(model, folder, RandomExperts(round(way.bits)), "stand-in")
    else:
        head = None if way.head == WHOLE else _packer(replace(way, sparsity=0.0, method=way.head_method))
        pack_model(model, folder, Linears({way.stored.format: _packer(way)}), "stand-in", head=head)


def _packer(way: PlannedWay) -> Callable[[Tensor], Packed]:
    """Packs the first matrix of each shape."""
    packed: dict[torch.Size, Packed] = {}

    def once(weight: Tensor) -> Packed:
        if weight.shape not in packed:
            packed[weight.shape] = _encoded(weight, way)
        return packed[weight.shape]

    return once


def _encoded(weight: Tensor, way: PlannedWay) -> Packed:
    form = way.stored.format
    if form == SpQRMatrix.name:
        return random_spqr(SpQRMatrix, tuple(weight.shape), weight.dtype)
    kept = torch.where(torch.rand(weight.shape) < way.sparsity, 0, weight) if way.sparsity else weight
    return Scaled.encode(form, kept) if way.dtype == INT8 else encode(form, kept)
