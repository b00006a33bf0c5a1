"""SpQR: Dettmers et al., "SpQR: A Sparse-Quantized Representation for Near-Lossless LLM Weight Compression", 2023.

Weights have 3 bits, in groups of 16 inputs of a row. A group's scale and zero point have 3 bits, too, in groups of 16
rows with four fp16 statistics a tile (the thesis' β₁ = β₂ = 16). The few weights that a group represents badly are
outliers: an fp16 number is added to what their code stands for. Columns are quantised in order, and the columns behind
take up each error (GPTQ).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from jaxtyping import Bool, Float, Float16, Int64, UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.kernels import csr, spqr
from toolkit.kernels.spqr import LEVELS, TILE, Codes
from toolkit.kernels.spqr.search import best_pairs, leave_one_out_gains
from toolkit.quantization.columns import check_range, quantise_columns
from toolkit.quantization.hessian import damped_factor

LARGEST = LEVELS - 1
MOST_STEPS = 1024  # a statistic this many of its steps from zero loses less by one value for the tile than by fp16


@dataclass(frozen=True, eq=False)
class Quantised:
    """A matrix quantised by SpQR: its codes, and its outliers as fp16 numbers to be added, by row and column."""

    codes: Codes
    rows: Int64[Tensor, " outliers"]
    columns: Int64[Tensor, " outliers"]
    values: Float16[Tensor, " outliers"]
    permutation: Int64[Tensor, " columns"] | None = None
    """Column i of the codes is column `permutation[i]` of the weight; None if the order was kept."""

    @cached_property
    def words(self) -> Int64[Tensor, "tall wide 16"]:
        """The codes as they are stored."""
        return spqr.pack(self.codes)

    @cached_property
    def outliers(self) -> csr.Outliers:
        """The outliers by rows, as they are stored."""
        return csr.encode("csr", self.codes.shape, self.rows, self.columns, self.values)

    @property
    def column_order(self) -> Int64[Tensor, " columns"]:
        """The weight's columns in the order of the codes."""
        return torch.arange(self.codes.shape[1]) if self.permutation is None else self.permutation

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, by name."""
        stored = {"words": self.words, "offsets": self.outliers.offsets, "col_vals": self.outliers.col_vals}
        return stored if self.permutation is None else stored | {"permutation": self.permutation.to(torch.int32)}

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def of_tensors(cls, shape: tuple[int, int], tensors: dict[str, Tensor]) -> Self:
        """The matrix of this shape whose `tensors` these are."""
        outliers = csr.CsrOutliers(shape, tensors["offsets"], tensors["col_vals"])
        permutation = tensors["permutation"].long() if "permutation" in tensors else None
        rows, columns, values = outliers.entries()
        return cls(spqr.unpack(tensors["words"], shape), rows, columns, values, permutation)

    def decode(self) -> Float[Tensor, "rows columns"]:
        """The dense weight in the original order of its columns, float32."""
        dense = spqr.decode(self.words, self.outliers)
        return dense if self.permutation is None else dense[:, self.permutation.argsort()]


@dataclass(frozen=True)
class SpQR:
    """The quantiser's settings.

    `outliers` is the share of weights that become outliers: those whose removal from their group lowers the group's
    squared error most (the leave-one-out criterion). The threshold that gives this share comes from the weights as
    they are at the start, so the share that is reached differs a little. `damping` is added to the Hessian's diagonal
    as a share of its mean. With `reorder`, columns are taken by falling diagonal of the Hessian (activation order).
    With `search`, a row's scale and zero point take the pair of codes that represents its group best, of all 64; else
    each takes the code nearest to what spans the group from its least to its largest weight, as the papers do. It costs
    no bytes. The defaults gave the least error of outputs on calibration text that had been held back.
    """

    outliers: float = 0.01
    damping: float = 0.1
    reorder: bool = True
    search: bool = True
    block_size: int = 128
    makes: ClassVar[type] = Quantised

    def __post_init__(self):
        """Refuse settings that no matrix can meet. Raises `UserError`."""
        if not 0 <= self.outliers <= 1:
            raise UserError(f"outliers is {self.outliers}; expected a share of the weights, from 0 to 1")
        if self.block_size < TILE or self.block_size % TILE:
            raise UserError(f"block_size is {self.block_size}; expected a multiple of {TILE}")

    def __call__(self, weight: Float[Tensor, "rows columns"], gram: Float[Tensor, "columns columns"]) -> Quantised:
        """Quantise a float32 matrix; `gram` = XᵀX stands for the Hessian 2XᵀX/n, as in `toolkit.pruning.sparsegpt`.

        Damping is raised where it is not enough (`damped_factor`). Raises `UserError` for a weight that is not finite
        or too large for fp16, or becomes so, for statistics that are not finite, or if no damping helps.
        """
        permutation = gram.diagonal().argsort(descending=True, stable=True) if self.reorder else None
        if permutation is not None:
            weight, gram = weight[:, permutation], gram[permutation][:, permutation]
        check_range(weight)
        factor = damped_factor(gram, self.damping)
        weight = weight.masked_fill(gram.diagonal() == 0, 0)
        grid = _Grid.start(weight.shape, self._threshold(weight, factor.diagonal()), self.search)
        quantise_columns(weight, factor, grid, TILE, self.block_size)
        return grid.finish(permutation)

    def round(self, weight: Float[Tensor, "rows columns"]) -> Quantised:
        """The same without data: every input counts alike, and no column takes up another's error."""
        check_range(weight)
        weight, diagonal = weight.float(), torch.ones(weight.shape[1])
        grid = _Grid.start(weight.shape, self._threshold(weight, diagonal), self.search)
        for start in range(0, weight.shape[1], TILE):
            group = slice(start, start + TILE)
            grid.fit(start, weight[:, group], diagonal[group])
            grid.round_columns(group, weight[:, group])
        return grid.finish(None)

    def _threshold(self, weight: Tensor, diagonal: Tensor) -> float:
        """The gain that a share `outliers` of the weights exceeds: midway between two weights' gains."""
        outliers = round(self.outliers * weight.numel())
        if outliers in (0, weight.numel()):
            return -torch.inf if outliers else torch.inf
        gains = [
            leave_one_out_gains(part, part_diagonal)
            for part, part_diagonal in zip(weight.split(TILE, dim=1), diagonal.split(TILE), strict=True)
        ]
        every = torch.cat(gains, dim=1).flatten()
        kept = weight.numel() - outliers
        return (every.kthvalue(kept).values.item() + every.kthvalue(kept + 1).values.item()) / 2


@dataclass(eq=False)
class _Grid:
    """The values of a matrix's groups (a `toolkit.quantization.columns.Grid`), and what its columns became on them."""

    threshold: float
    search: bool
    codes: UInt8[Tensor, "rows columns"]
    scales: UInt8[Tensor, "rows groups"]
    zeros: UInt8[Tensor, "rows groups"]
    second_order: Float16[Tensor, "tall groups 4"]
    outlier: Bool[Tensor, "rows columns"]
    added: Float16[Tensor, "rows columns"]  # what outliers add to their codes, and zeros elsewhere
    fitted: tuple[Float16[Tensor, " rows"], Float16[Tensor, " rows"]] | None = None
    """Each row's scale and zero point in the group that was fitted last."""

    @classmethod
    def start(cls, shape: tuple[int, int], threshold: float, search: bool) -> "_Grid":
        (rows, columns), groups = shape, -(-shape[1] // TILE)
        scales = torch.zeros(rows, groups, dtype=torch.uint8)
        second_order = torch.zeros(-(-rows // TILE), groups, 4, dtype=torch.float16)
        codes, added = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(rows, columns, dtype=torch.float16)
        return cls(threshold, search, codes, scales, scales.clone(), second_order, added.bool(), added)

    def fit(self, start: int, weight: Tensor, diagonal: Tensor) -> None:
        """Choose which weights of a group of columns are outliers, and each row's scale and zero point without them."""
        group, outlier = start // TILE, torch.zeros_like(weight, dtype=torch.bool)
        if self.threshold < torch.inf:
            outlier = leave_one_out_gains(weight, diagonal) > self.threshold
        self.outlier[:, start : start + TILE] = outlier
        scale, zero = first_order(*bounds(weight.masked_fill(outlier, 0)))
        self.scales[:, group], scale_step, scale_zero = second_order(scale)
        self.zeros[:, group], zero_step, zero_zero = second_order(zero)
        self.second_order[:, group] = torch.stack([scale_step, zero_step, scale_zero, zero_zero], 1)
        if self.search:
            values = [
                values_of_codes(len(weight), *each) for each in ((scale_step, scale_zero), (zero_step, zero_zero))
            ]
            pairs = best_pairs(weight, ~outlier / diagonal.square(), *values)
            self.scales[:, group], self.zeros[:, group] = pairs
        scale = _spread(self.scales[:, group], scale_step, scale_zero)
        self.fitted = scale, _spread(self.zeros[:, group], zero_step, zero_zero)

    def round(self, column: int, values: Tensor) -> Tensor:
        """Keep codes and outliers of a column; return what they stand for."""
        return self.round_columns(slice(column, column + 1), values[:, None])[:, 0]

    def round_columns(self, columns: slice, values: Tensor) -> Tensor:
        """The same for some columns of the group that was fitted last."""
        scale, zero = (each[:, None] for each in self.fitted)
        self.codes[:, columns] = encode(values, scale, zero)
        value = decode(self.codes[:, columns], scale, zero)
        self.added[:, columns] = torch.where(self.outlier[:, columns], values - value, 0)
        return value + self.added[:, columns].to(values.dtype)

    def finish(self, permutation: Tensor | None) -> Quantised:
        """The matrix on its grid. Raises `UserError` if a weight, rounded as fp16 does, is not finite."""
        rows, columns = self.outlier.nonzero(as_tuple=True)
        codes = Codes(self.codes, self.scales, self.zeros, self.second_order)
        found = Quantised(codes, rows, columns, self.added[rows, columns], permutation)
        dense = spqr.decode(found.words, csr.no_outliers((len(self.codes), TILE * self.scales.shape[1])))
        if not bool(dense.isfinite().all() and found.values.isfinite().all()):
            raise UserError("cannot quantise: a weight near fp16's largest becomes infinite; divide the weights first")
        return found


def bounds(weight: Float[Tensor, "... group"]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """The smallest and the largest weight of each group; zero lies between them."""
    return weight.amin(-1).clamp(max=0), weight.amax(-1).clamp(min=0)


def first_order(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point, so that code 0 stands for `low` and code 7 for `high`; 1 and 0 for a group of zeros."""
    scale = (high - low) / LARGEST
    scale = torch.where(scale > 0, scale, 1)
    return scale, -low / scale


def second_order(
    statistics: Float[Tensor, " rows"],
) -> tuple[UInt8[Tensor, " rows"], Float16[Tensor, " tall"], Float16[Tensor, " tall"]]:
    """Codes of the rows' scales or zero points, and each tile's scale and zero point of them."""
    rows = len(statistics)
    if not rows:
        return statistics.to(torch.uint8), statistics.to(torch.float16), statistics.to(torch.float16)
    tiles = torch.cat([statistics, statistics[-1:].expand(-rows % TILE)]).view(-1, TILE)
    low, high = tiles.amin(1), tiles.amax(1)
    step = (high - low) / LARGEST
    alike = low.abs() >= MOST_STEPS * step  # then code 1 stands for all of them
    step = torch.where(alike, (low + high) / 2, step).to(torch.float16)
    zero = torch.where(alike | (step == 0), 0, -low / step).to(torch.float16)
    codes = encode(tiles, step[:, None], zero[:, None])
    codes = torch.where(alike[:, None], 1, codes).to(torch.uint8)
    return codes.flatten()[:rows], step, zero


def encode(values: Tensor, scale: Float16[Tensor, "..."], zero: Float16[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """The codes nearest to float32 values; 0 where the scale is 0."""
    steps = torch.where(scale == 0, 0, values / scale.to(values.dtype) + zero.to(values.dtype))
    return steps.round().clamp(0, LARGEST).to(torch.uint8)


def decode(
    codes: UInt8[Tensor, "..."], scale: Float16[Tensor, "..."], zero: Float16[Tensor, "..."]
) -> Float16[Tensor, "..."]:
    """scale · (code − zero), each step rounded to fp16, as the kernels compute it."""
    return (codes.to(torch.float16) - zero) * scale


def values_of_codes(
    rows: int, step: Float16[Tensor, " tall"], zero: Float16[Tensor, " tall"]
) -> Float[Tensor, "rows 8"]:
    """The value of each code as a row's scale or zero point."""
    codes = torch.arange(LEVELS, dtype=torch.uint8).expand(rows, LEVELS)
    step, zero = (part.repeat_interleave(TILE)[:rows, None] for part in (step, zero))
    return decode(codes, step, zero).float()


def _spread(codes: UInt8[Tensor, " rows"], step: Float16[Tensor, " tall"], zero: Float16[Tensor, " tall"]) -> Tensor:
    """Each row's scale or zero point from its code and its tile's statistics, fp16."""
    rows = len(codes)
    step, zero = (part.repeat_interleave(TILE)[:rows] for part in (step, zero))
    return decode(codes, step, zero)
