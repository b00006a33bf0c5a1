"""Prune or quantise a model's decoder linears in place, block after block."""

import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.plain import plain
from toolkit.models.streams import Stream, inference, open_stream
from toolkit.pattern import Pattern, resolve
from toolkit.progress import progress
from toolkit.sparsity.calibration import check_finite, check_finite_block, checked_windows
from toolkit.sparsity.grams import statistics_of, walk
from toolkit.sparsity.methods import METHODS, PruningMethod
from toolkit.sparsity.treatment import Treatment

log = logging.getLogger(__name__)


class StoredMatrix(Protocol):
    """A matrix as it is stored."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that `decode` needs, but for the shape."""
        ...

    def decode(self) -> Float[Tensor, "rows columns"]:
        """The dense weight."""
        ...


class Matrix(StoredMatrix, Protocol):
    """One that is kept."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to keep, by name: contiguous, no two in the same memory."""
        ...

    @classmethod
    def of_tensors(cls, shape: tuple[int, int], tensors: dict[str, Tensor]) -> Self:
        """The same matrix again."""
        ...


@dataclass(frozen=True, eq=False)
class DenseMatrix:
    """A `Matrix` as it is, such as a pruned one."""

    weight: Float[Tensor, "rows columns"]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, zeros too."""
        return self.weight.nbytes

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weight."""
        return {"weight": self.weight.contiguous()}

    def decode(self) -> Float[Tensor, "rows columns"]:
        """The weight, in its own type."""
        return self.weight

    @classmethod
    def of_tensors(cls, shape: tuple[int, int], tensors: dict[str, Tensor]) -> Self:
        """The matrix of this shape whose `tensors` these are."""
        return cls(tensors["weight"].view(shape))


class WeightChange(Protocol):
    """Maps a weight [rows, columns] and a statistic of its inputs, both float32, to the new weight.

    It is a frozen dataclass of its settings: `Pruning`, or a quantiser. `statistic` names the statistic of the inputs X
    that it needs: None, "norms" (the diagonal of XᵀX) or "gram" (all of XᵀX). It may get more than it needs. A common
    factor changes nothing. `makes` is the class of its results.
    """

    statistic: str | None
    makes: type[Matrix]

    def __call__(self, weight: Tensor, gram: Tensor | None) -> Matrix | Tensor:
        """The stored matrix, or a dense one [rows, columns]; the arguments stay as they are.

        Raises `UserError` for a weight or a statistic that it cannot work with.
        """
        ...


@dataclass(frozen=True)
class Pruning:
    """The change that sets weights to zero by a method: a share `sparsity` of them, or as a pattern wants it."""

    method: PruningMethod
    sparsity: float
    pattern: Pattern | None = None
    makes: ClassVar[type] = DenseMatrix

    @classmethod
    def by(cls, method: str | PruningMethod = "wanda", sparsity: float = 0.5, pattern: str | None = None) -> Self:
        """From arguments as `prune` takes them. Raises `UserError` for an unknown method, and as `resolve` does."""
        if isinstance(method, str):
            if method not in METHODS:
                raise unknown("pruning method", method, METHODS)
            method = METHODS[method]
        return cls(method, *resolve(sparsity, pattern))

    @property
    def statistic(self) -> str | None:
        """That of the method."""
        return self.method.statistic

    def __call__(self, weight: Tensor, gram: Tensor | None) -> Float[Tensor, "rows columns"]:
        """Prune a weight."""
        return self.method(weight, gram, self.sparsity, self.pattern)


@dataclass(frozen=True)
class LayerStatistics:
    """The effect of a change on one linear."""

    name: str
    rows: int
    columns: int
    nbytes: int
    """Bytes of the matrix as it is stored."""
    sparsity: float
    """Share of zeros reached."""


@dataclass(frozen=True)
class Block:
    """A block's changed matrices by the linear's dotted name inside it, and a record of each."""

    matrices: Mapping[str, Matrix]
    statistics: tuple[LayerStatistics, ...]


def prune(
    model: nn.Module,
    method: str | PruningMethod = "wanda",
    sparsity: float = 0.5,
    pattern: str | None = None,
    calibration: Int64[Tensor, "windows tokens"] | None = None,
) -> list[LayerStatistics]:
    """Prune every linear of every decoder block in place; embeddings and head stay. Return one record per linear.

    `method` is a name in `METHODS`, or a method with settings of its own, such as `SparseGPT(damping=0.1)`.
    `sparsity` is the share of zeros; `pattern` "N:M" keeps N of every M consecutive inputs and decides the sparsity.
    `calibration` holds token ids as `Calibration.draw` and `cut_windows` give them; magnitude pruning needs none.
    Raises `UserError` as `change_blocks` and `Pruning.by` do.
    """
    blocks = change_blocks(model, Pruning.by(method, sparsity, pattern), calibration)
    return [record for block in blocks for record in block.statistics]


@torch.no_grad()
def change_blocks(
    model: nn.Module,
    change: WeightChange,
    windows: Int64[Tensor, "windows tokens"] | None = None,
    first: int = 0,
) -> Generator[Block, None, None]:
    """Change every linear of every decoder block in place, and yield each block; embeddings and head stay.

    Each block is calibrated on `windows`, the outputs of the changed blocks before it. Blocks before number `first` are
    changed already. One block's statistics and results are held at once. Statistics and solves are float32; weights are
    rounded to the model's type.

    Raises `UserError` before any weight changes for arguments that don't fit the model or each other and for weights
    that are not finite, and later, with the earlier blocks changed, for activations that are not finite and what
    `change` raises, with the linear's name.
    """
    windows = _checked_change(model, change, windows)
    blocks, names = decoder_blocks(model), {module: name for name, module in model.named_modules()}
    check_finite(model)
    with inference(model), progress(_title(change), len(blocks) - first, "blocks") as bar:
        passes = ((block, {}) for block in blocks[first:])
        if windows is not None and change.statistic:
            passes = walk(model, windows, first, change.statistic == "norms")
        for block, grams in passes:
            changed = _change_block(block, names, grams, change)
            bar.update()
            yield changed


class Changing(Treatment):
    """The change of every linear of a block, calibrated on the outputs of the changed blocks before it.

    `streamed`: the windows run through the blocks even if the change takes no statistic.
    """

    def __init__(self, change: WeightChange | None, windows: Tensor | None = None, streamed: bool = False):
        self._change, self._windows = change, windows
        self._streamed = streamed or bool(change and change.statistic)
        self._stream: Stream | None = None

    def begin(self, model: nn.Module) -> None:
        """Check the model and the windows. Raises `UserError` as `change_blocks` does before it changes a weight."""
        self._names = {module: name for name, module in model.named_modules()}
        self._dtype, self._last = model.dtype, len(decoder_blocks(model)) - 1
        windows = self._windows
        if self._change is not None:
            windows = _checked_change(model, self._change, windows)
        if self._streamed:
            self._stream = open_stream(model, checked_windows(model, windows))

    @torch.no_grad()
    def treat(self, number: int, block: nn.Module) -> Mapping[str, Matrix]:
        """Change a block. Raises `UserError` as `change_blocks` does."""
        matrices: Mapping[str, Matrix] = {}
        if self._change is not None:
            check_finite_block(block, self._names)
            grams: dict[str, Tensor] = {}
            if self._change.statistic:
                norms_only, name = self._change.statistic == "norms", f"block {number}"
                grams = statistics_of(block, self._stream.calls, norms_only, name, self._dtype)
            matrices = _change_block(block, self._names, grams, self._change).matrices
        self._advance(number, block)
        return matrices

    def _advance(self, number: int, block: nn.Module) -> None:
        """Run the changed block."""
        if self._stream is not None and number < self._last:
            self._stream.advance()

    @property
    def state(self) -> dict[str, Tensor]:
        """The hidden states."""
        return {} if self._stream is None else self._stream.state

    def restore(self, state: Mapping[str, Tensor], number: int) -> None:
        """Put the hidden states before a block."""
        if self._stream is not None:
            self._stream.restore(state, number)

    def close(self) -> None:
        """End the stream."""
        if self._stream is not None:
            self._stream.close()


def _title(change: WeightChange) -> str:
    method = type(getattr(change, "method", change)).__name__
    return f"{'pruning' if isinstance(change, Pruning) else 'quantising'} by {method}"


def _checked_change(model: nn.Module, change: WeightChange, windows: Tensor | None) -> Tensor | None:
    """The windows as a model takes them. Raises `UserError` for a model, a change or windows that do not fit."""
    blocks, names = decoder_blocks(plain(model)), {module: name for name, module in model.named_modules()}
    _check_pattern(blocks, names, getattr(change, "pattern", None))
    if not isinstance(change, Pruning):
        _check_shared(blocks, names)
    if windows is not None:
        windows = checked_windows(model, windows)
    elif change.statistic:
        method = type(getattr(change, "method", change)).__name__
        raise UserError(f"{method} needs calibration windows: pass calibration=cut_windows(...)")
    if change.statistic == "gram":
        _warn_of_few_tokens(blocks, names, windows.numel())
    return windows


def _change_block(
    block: nn.Module, names: Mapping[nn.Module, str], grams: Mapping[str, Tensor], change: WeightChange
) -> Block:
    matrices, statistics = {}, []
    for op, linear in decoder_linears(block).items():
        matrices[op], record = _change(names[linear], linear, grams.get(op), change)
        statistics.append(record)
    return Block(matrices, tuple(statistics))


def _change(name: str, linear: nn.Linear, gram: Tensor | None, change: WeightChange) -> tuple[Matrix, LayerStatistics]:
    dense = linear.weight.to(torch.float32, copy=True)
    try:
        made = change(dense, gram)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    linear.weight.copy_(made if isinstance(made, Tensor) else made.decode())
    matrix = DenseMatrix(linear.weight.detach()) if isinstance(made, Tensor) else made
    zeros = dense.numel() - int((linear.weight != 0).sum())  # four times as fast as count_nonzero
    rows, columns = dense.shape
    return matrix, LayerStatistics(name, rows, columns, matrix.nbytes, zeros / dense.numel())


def _check_pattern(blocks: list[nn.Module], names: Mapping[nn.Module, str], pattern: Pattern | None) -> None:
    for linear in (linear for block in blocks for linear in decoder_linears(block).values()):
        if pattern and linear.in_features % pattern.group:
            columns = linear.in_features
            raise UserError(
                f"{names[linear]} has {columns} columns, which {pattern.group} does not divide: no {pattern}"
            )


def _check_shared(blocks: list[nn.Module], names: Mapping[nn.Module, str]) -> None:
    """Raise `UserError` for a weight that two blocks share: the second one would quantise it once more."""
    owners: dict[int, str] = {}
    for linear in (linear for block in blocks for linear in decoder_linears(block).values()):
        if (first := owners.setdefault(id(linear.weight), names[linear])) != names[linear]:
            raise UserError(
                f"{names[linear]} is {first} once more: blocks that share a matrix cannot be quantised one by one; "
                "prune the model instead, by wanda for example"
            )


def _warn_of_few_tokens(blocks: list[nn.Module], names: Mapping[nn.Module, str], tokens: int) -> None:
    linears = [linear for block in blocks for linear in decoder_linears(block).values()]
    most = max(linears, key=lambda linear: linear.in_features, default=None)
    if most is not None and tokens < most.in_features:
        words = "calibration is short: %d tokens for %d inputs (%s), so only damping makes Hessians definite; "
        log.warning(words + "give more windows", tokens, most.in_features, names[most])
