"""The column walk of SparseGPT, GPTQ and SpQR: columns change in order, and later columns compensate for the errors.

The methods take a linear's Hessian H = XᵀX and the upper U with UᵀU = H⁻¹ (Frantar et al., "GPTQ", ICLR 2023,
algorithm 1). With H = RRᵀ for an upper R, U is the inverse of R. The columns before a block add D·R·U to it: D is the
old weight minus the new one in these columns, R has their rows and the block's columns, and U is the block's own. This
equals the paper's sum over E·U, since D = E·U and R·U is the identity. It takes one Cholesky factorisation and inverses
of blocks, but no inverse of H.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.errors import UserError

LEAST, MOST = 1e-3, 10.0  # damping that is tried where the one asked for is not enough
STEP = 8  # columns changed one by one: small enough for one thread
TILE = 512  # columns factorised at once: products of tiles take nearly all of the time

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Factor:
    """The Cholesky factor of a Hessian, and the order of its columns."""

    upper: Float[Tensor, "columns columns"]
    """R; zeros below the diagonal."""
    order: Int64[Tensor, " columns"] | None
    """Column i of `upper` is column `order[i]` of the weight; None if the order was kept."""

    @property
    def diagonal(self) -> Float[Tensor, " columns"]:
        """The diagonal of U. A column's error divided by its entry is what the output loses."""
        return 1 / self.upper.diagonal()

    def inverse(self, block: slice) -> Float[Tensor, "block block"]:
        """A block of U on its diagonal."""
        upper = self.upper[block, block]
        identity = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
        return torch.linalg.solve_triangular(upper, identity, upper=True)


_latest = WeakIdKeyDictionary()  # Gram matrix → its settings and factor


def factorised(gram: Float[Tensor, "n n"], damping: float, reorder: bool = False) -> Factor:
    """The factor of `gram` = XᵀX; a constant factor on it changes nothing.

    `damping` is added to the diagonal as a share of its mean, and raised tenfold, with a warning, as long as the
    Hessian is not positive definite: rounding can make the Hessian of correlated inputs indefinite. `reorder` takes
    columns by falling diagonal. The latest factor of a matrix is kept as long as the matrix lives unchanged, so that
    linears with one input share it.

    Raises `UserError` for statistics that are not finite, or if a damping of `MOST` is not enough.
    """
    settings = damping, reorder, gram._version
    if _latest.get(gram, (None,))[0] != settings:
        _latest[gram] = settings, _factorised(gram, damping, reorder)
    return _latest[gram][1]


def _factorised(gram: Tensor, damping: float, reorder: bool) -> Factor:
    diagonal = gram.diagonal()
    if not diagonal.isfinite().all():
        raise UserError("the calibration statistics are not finite; load the model in bfloat16 or float32")
    order = diagonal.argsort(descending=True, stable=True) if reorder else None
    unused, hessian = diagonal == 0, torch.empty_like(gram)  # of 8,960 columns it takes 321 MB: the only copy
    taken = damping
    while True:
        damped = (diagonal + taken * diagonal.mean()).masked_fill(unused, 1)  # no input arrives there: any value does
        _take_in_order(gram, order, hessian)
        hessian.diagonal().copy_(damped if order is None else damped[order])
        if _factorise(hessian):
            break
        if taken >= MOST:
            raise UserError(f"the Hessian is not positive definite with damping {taken}; give more windows")
        taken = max(10 * taken, LEAST)
    if taken != damping:
        words = "the Hessian of %d inputs is not positive definite with damping %g: damping %g was taken"
        log.warning(words, len(gram), damping, taken)
    return Factor(hessian, order)


def _take_in_order(gram: Float[Tensor, "n n"], order: Int64[Tensor, " n"] | None, out: Float[Tensor, "n n"]) -> None:
    """Copy a matrix, with rows and columns in this order, a few rows at a time."""
    for start in range(0, len(gram), TILE):
        tile = slice(start, start + TILE)
        out[tile] = gram[tile] if order is None else gram[order[tile]][:, order]


def _factorise(hessian: Float[Tensor, "n n"]) -> bool:
    """Replace a symmetric H by the upper R with H = RRᵀ, in place; False if H is not positive definite.

    Only the upper triangle of H is read. The last columns come first: those before them lose their share of H.
    """
    for start in reversed(range(0, len(hessian), TILE)):
        tile = slice(start, start + TILE)
        lower, failed = torch.linalg.cholesky_ex(hessian[tile, tile].flip(0, 1))
        if failed:
            return False
        upper, above = lower.flip(0, 1), hessian[:start, tile]
        hessian[tile, tile] = upper
        above.copy_(torch.linalg.solve_triangular(upper.T, above, upper=False, left=False))
        for first in range(0, start, TILE):
            rows, columns = slice(first, first + TILE), slice(first, start)
            hessian[rows, columns].addmm_(above[rows], above[columns].T, alpha=-1)
    hessian.triu_()
    return True


def compensated(
    weight: Float[Tensor, "columns rows"],
    factor: Factor,
    block_size: int,
    choose: Callable[[slice, Tensor, Tensor], None],
) -> Float[Tensor, "columns rows"]:
    """Change the columns of a weight block by block; the columns behind take up each error.

    `choose(block, wanted, inverse)` replaces a block of wanted columns [block, rows] by their final values, in place;
    `inverse` is the factor's. Columns lie in rows here, so that each is contiguous.
    """
    changed = torch.zeros_like(weight)  # D·R for the blocks to come, and then their values
    for start in range(0, len(weight), block_size):
        block, rest = slice(start, start + block_size), slice(start + block_size, None)
        inverse = factor.inverse(block)
        changed[block] = torch.addmm(weight[block], inverse.T, changed[block])
        choose(block, changed[block], inverse)
        changed[rest].addmm_(factor.upper[block, rest].T, weight[block] - changed[block])
    return changed


def one_by_one(
    wanted: Float[Tensor, "block rows"],
    inverse: Float[Tensor, "block block"],
    step: int,
    fit: Callable[[slice], None],
    change: Callable[[int], Tensor],
) -> None:
    """Change a block of wanted columns one after the other, in place.

    `fit(group)` is called before each `step` columns, once these have taken up all errors before them, and then
    `change(column)` returns the new values [rows] of each of them. Errors reach the next `step` columns at once and the
    rest of the block in one product. The sums are the same.
    """
    errors, diagonal = torch.zeros_like(wanted), inverse.diagonal()
    for first in range(0, len(wanted), step):
        group = slice(first, first + step)
        wanted[group].addmm_(inverse[:first, group].T, errors[:first], alpha=-1)
        fit(group)
        for i in range(first, min(first + step, len(wanted))):
            changed = change(i)
            errors[i] = (wanted[i] - changed) / diagonal[i]
            wanted[i] = changed
            wanted[i + 1 : group.stop].addr_(inverse[i, i + 1 : group.stop], errors[i], alpha=-1)
