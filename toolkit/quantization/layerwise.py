"""Quantise a model's decoder linears in place, block after block."""

import logging
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models import decoder_linears
from toolkit.pruning.calibration import check_finite, inference, relative_output_error, walk

log = logging.getLogger(__name__)


class Matrix(Protocol):
    """A quantised matrix."""

    nbytes: int
    """Bytes of all that `decode` needs, but for the shape."""
    tensors: dict[str, Tensor]
    """The tensors to keep, by name: contiguous, no two in the same memory."""

    def decode(self) -> Float[Tensor, "rows columns"]:
        """The dense weight, float32."""
        ...

    @classmethod
    def of_tensors(cls, shape: tuple[int, int], tensors: dict[str, Tensor]) -> Self:
        """The same matrix again."""
        ...


class Quantiser(Protocol):
    """Maps a weight [rows, columns] and gram = XᵀX [columns, columns], float32 both, to a quantised matrix.

    It is a frozen dataclass of its settings. The arguments stay as they are, and a factor on all of `gram` changes
    nothing. `makes` is the class of its results.
    """

    makes: ClassVar[type[Matrix]]

    def __call__(self, weight: Tensor, gram: Tensor) -> Matrix:
        """Quantise. Raises `UserError` for a weight or Hessian that cannot be."""
        ...


@dataclass(frozen=True)
class QuantisedLayer:
    """The effect of quantising on one linear."""

    name: str
    rows: int
    columns: int
    nbytes: int
    """Bits of the quantised matrix, all counted."""
    relative_output_error: float | None
    """‖X(W − Ŵ)ᵀ‖ / ‖XWᵀ‖ on the calibration inputs X that the layer saw; None if it was not measured."""
    seconds: float
    """Quantising alone; the calibration passes are not in it."""


@dataclass(frozen=True)
class Block:
    """A block's quantised matrices by the linear's dotted name inside it, and a record of each."""

    matrices: Mapping[str, Matrix]
    statistics: tuple[QuantisedLayer, ...]


@torch.no_grad()
def quantise_blocks(
    model: nn.Module,
    quantiser: Quantiser,
    windows: Int64[Tensor, "windows tokens"],
    batch_size: int = 1,
    first: int = 0,
    errors: bool = False,
) -> Generator[Block, None, None]:
    """Quantise every linear of every decoder block in place, and yield each block; embeddings and head stay.

    Each block is calibrated on `windows`, the outputs of the quantised blocks before it. Blocks before number `first`
    are quantised already. `errors` also measures each linear's output error. One block's Gram matrices and results are
    held at once. Statistics and solves are float32; the decoded weights are rounded to the model's type.

    Raises `UserError` for weights or activations that are not finite, and what the quantiser raises, with the linear's
    name; the earlier blocks are quantised then.
    """
    check_finite(model)
    names = {module: name for name, module in model.named_modules()}
    with inference(model):
        for block, grams in walk(model, windows, batch_size, first):
            matrices, statistics = {}, []
            for op, linear in decoder_linears(block).items():
                if windows.numel() < linear.in_features:
                    _warn_too_short(names[linear], linear.in_features, windows.numel())
                matrices[op], record = _quantise(names[linear], linear, grams[op], quantiser, errors)
                statistics.append(record)
            yield Block(matrices, tuple(statistics))


def _quantise(
    name: str, linear: nn.Linear, gram: Tensor, quantiser: Quantiser, errors: bool
) -> tuple[Matrix, QuantisedLayer]:
    start = time.perf_counter()
    dense = linear.weight.to(torch.float32, copy=True)
    try:
        matrix = quantiser(dense, gram)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    linear.weight.copy_(matrix.decode())
    seconds = time.perf_counter() - start
    error = relative_output_error(dense, linear.weight.float(), gram) if errors else None
    rows, columns = dense.shape
    return matrix, QuantisedLayer(name, rows, columns, matrix.nbytes, error, seconds)


def _warn_too_short(name: str, inputs: int, tokens: int) -> None:
    log.warning(
        "calibration is short: %d tokens for the %d inputs of %s, so only damping makes its Hessian definite; "
        "give more windows",
        tokens,
        inputs,
        name,
    )
