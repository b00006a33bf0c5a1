"""Prune a model's decoder linears in place, block after block."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.progress import progress
from toolkit.pruning.calibration import check_finite, checked_windows, inference, relative_output_error, walk
from toolkit.pruning.methods import METHODS, PruningMethod
from toolkit.sparsity import Pattern, resolve


@dataclass(frozen=True)
class LayerStatistics:
    """The effect of pruning on one linear."""

    name: str
    rows: int
    columns: int
    sparsity: float
    """Share of zeros reached."""
    relative_output_error: float | None
    """‖X(W − Ŵ)ᵀ‖ / ‖XWᵀ‖ on the calibration inputs X that the layer saw; None if it was not measured."""
    seconds: float
    """Choosing and applying the mask; the calibration passes are not in it."""


@torch.no_grad()
def prune(
    model: nn.Module,
    method: str | PruningMethod = "wanda",
    sparsity: float = 0.5,
    pattern: str | None = None,
    calibration: Tensor | None = None,
    batch_size: int = 1,
    errors: bool = False,
) -> list[LayerStatistics]:
    """Prune every linear of every decoder block in place; embeddings and head stay. Return one record per linear.

    `method` is a name in `METHODS`, or a method with settings of its own, such as `SparseGPT(damping=0.1)`.
    `sparsity` is the share of zeros; `pattern` "N:M" keeps N of every M consecutive inputs and decides the sparsity.
    `calibration` holds token ids, int64 [windows, tokens], as `Calibration.draw` and `cut_windows` give them; magnitude
    pruning needs none. `batch_size` windows run at once: 1 on a CPU. `errors` also measures each linear's output error,
    which takes about as long as SparseGPT.
    Blocks are pruned in order, and each gets the outputs of the pruned blocks before it. Works in any floating dtype
    and on any device. Statistics and solves are float32.

    Raises `UserError` before any weight changes for arguments that don't fit the model or each other, and later, with
    the earlier blocks pruned, if the activations overflow or SparseGPT's damping is too small.
    """
    name = method if isinstance(method, str) else type(method).__name__
    if isinstance(method, str):
        if method not in METHODS:
            raise unknown("pruning method", method, METHODS)
        method = METHODS[method]
    sparsity, wanted = resolve(sparsity, pattern)
    if wanted:
        _check_pattern(model, wanted)
    check_finite(model)
    windows = _windows(model, method, calibration, batch_size)

    names = {module: name for name, module in model.named_modules()}
    blocks = decoder_blocks(model)
    statistics = []
    with inference(model), progress(f"pruning by {name}", len(blocks), "blocks") as bar:
        norms_only = method.statistic == "norms" and not errors
        passes = ((block, {}) for block in blocks)
        if windows is not None:
            passes = walk(model, windows, batch_size, norms_only=norms_only)
        for block, grams in passes:
            for op, linear in decoder_linears(block).items():
                record = _prune_linear(names[linear], linear, grams.get(op), method, sparsity, wanted, errors)
                statistics.append(record)
            bar.update()
    return statistics


def _prune_linear(
    name: str,
    linear: nn.Linear,
    gram: Tensor | None,
    method: PruningMethod,
    sparsity: float,
    pattern: Pattern | None,
    errors: bool,
) -> LayerStatistics:
    start = time.perf_counter()
    dense = linear.weight.to(torch.float32, copy=True)
    try:
        linear.weight.copy_(method(dense, gram, sparsity, pattern))
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    pruned = linear.weight.float()
    left = int(torch.count_nonzero(pruned))  # waits for the device, so that the clock below counts its work
    seconds = time.perf_counter() - start
    error = relative_output_error(dense, pruned, gram) if errors and gram is not None else None
    rows, columns = dense.shape
    reached = (pruned.numel() - left) / pruned.numel()
    return LayerStatistics(name, rows, columns, reached, error, seconds)


def _check_pattern(model: nn.Module, pattern: Pattern) -> None:
    names = {module: name for name, module in model.named_modules()}
    for block in decoder_blocks(model):
        for linear in decoder_linears(block).values():
            name, columns = names[linear], linear.in_features
            if columns % pattern.group:
                raise UserError(f"{name} has {columns} columns, which {pattern.group} does not divide: no {pattern}")


def _windows(model: nn.Module, method: PruningMethod, calibration: Tensor | None, batch_size: int) -> Tensor | None:
    """The calibration windows, checked; None if there are none and none are needed."""
    if calibration is None:
        if method.statistic:
            raise UserError(f"{type(method).__name__} needs calibration windows: pass calibration=cut_windows(...)")
        return None
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; expected a whole number, at least 1")
    return checked_windows(model, calibration)
