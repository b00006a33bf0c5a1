"""SpQR: Dettmers et al., "SpQR: A Sparse-Quantized Representation for Near-Lossless LLM Weight Compression", 2023.

Weights have 3 bits, in groups of 16 inputs of a row or more. A group's scale and zero point have 3 bits, too, in groups
of 16 rows with four fp16 statistics (the thesis' β₁ = β₂ = 16). The few weights that a group represents badly are
outliers: an fp16 number is added to the value of their code. Columns are quantised in order, and later columns
compensate for each error (GPTQ).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from jaxtyping import Float, Float16, Int64
from torch import Tensor
from torch.nn.functional import pad

from toolkit.errors import UserError
from toolkit.kernels import csr, spqr
from toolkit.kernels.spqr import TILE, Codes
from toolkit.kernels.spqr.quantise import LANES, leave_one_out_gains, quantise
from toolkit.quantization.groups import check_range
from toolkit.sparsity.hessian import Factor, compensated, factorised


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
    squared error most (the leave-one-out criterion). The threshold that gives this share comes from the weights as they
    are at the start, so the share that is reached differs a little. `damping` is added to the Hessian's diagonal as a
    share of its mean. With `reorder`, columns are taken by falling diagonal of the Hessian (activation order). With
    `search`, a row's scale and zero point take the best of all 64 pairs of codes for its group. Without it, each takes
    the code nearest to the value that spans the group from its least to its largest weight, as in the papers. Both cost
    the same bytes. The defaults had the least output error on held-out calibration text. `group` is how many columns
    share a row's scale and zero point, a multiple of 16. Tiles of one group hold the same statistics, so a larger group
    does not take fewer bytes in this format.
    """

    outliers: float = 0.01
    damping: float = 0.1
    reorder: bool = True
    search: bool = True
    block_size: int = 128
    group: int = TILE
    statistic: ClassVar[str] = "gram"
    makes: ClassVar[type] = Quantised

    def __post_init__(self):
        """Refuse settings that no matrix can meet. Raises `UserError`."""
        if not 0 <= self.outliers <= 1:
            raise UserError(f"outliers is {self.outliers}; expected a share of the weights, from 0 to 1")
        if self.group < TILE or self.group % TILE:
            raise UserError(f"group is {self.group}; expected a multiple of {TILE}")
        if self.block_size < self.group or self.block_size % self.group:
            raise UserError(f"block_size is {self.block_size}; expected a multiple of {self.group}")

    def __call__(self, weight: Float[Tensor, "rows columns"], gram: Float[Tensor, "columns columns"]) -> Quantised:
        """Quantise a float32 matrix; `gram` = XᵀX stands for the Hessian 2XᵀX/n, as in `toolkit.sparsity.sparsegpt`.

        Raises `UserError` for a weight that is not finite or too large for fp16, or becomes so, and as `factorised`.
        """
        check_range(weight)
        factor = factorised(gram, self.damping, self.reorder)
        return self._quantise(weight, factor, gram.diagonal() == 0)

    def round(self, weight: Float[Tensor, "rows columns"]) -> Quantised:
        """The same without data: every input has the same weight, and no column compensates for another one's error."""
        check_range(weight)
        return self._quantise(weight.float(), None)

    def _quantise(self, weight: Tensor, factor: Factor | None, unused: Tensor | None = None) -> Quantised:
        """The matrix whose columns are quantised one after the other. Columns that are `unused` become zero."""
        rows, columns = weight.shape
        order = None if factor is None else factor.order
        diagonal = torch.ones(columns) if factor is None else factor.diagonal
        tall, wide = spqr.tiles(weight.shape)
        groups = -(-columns // self.group)
        weight = pad(weight.T if order is None else weight.T[order], (0, -rows % LANES)).contiguous()
        if unused is not None:
            weight[unused if order is None else unused[order]] = 0
        threshold = self._threshold(weight, diagonal, rows)
        codes, added = torch.zeros(weight.shape, dtype=torch.uint8), torch.zeros_like(weight)
        outlier, scales = codes.bool(), torch.zeros(groups, weight.shape[1], dtype=torch.uint8)
        zeros, second_order = scales.clone(), torch.zeros(groups, tall, 4, dtype=torch.float16)

        def choose(block: slice, wanted: Tensor, inverse: Tensor) -> None:
            own = slice(block.start // self.group, -(-block.stop // self.group))
            parts = codes[block], scales[own], zeros[own], second_order[own], outlier[block], added[block]
            given = wanted, inverse.contiguous(), diagonal[block].contiguous(), rows, threshold, self.search
            quantise(*given, self.group, *parts)

        if factor is None:
            choose(slice(0, columns), weight.clone(), torch.empty(0, 0))
        else:
            compensated(weight, factor, self.block_size, choose)
        scales, zeros, second_order = (
            part.repeat_interleave(self.group // TILE, dim=0)[:wide] for part in (scales, zeros, second_order)
        )
        by_row = (part[:, :rows].T.contiguous() for part in (codes, scales, zeros))
        found = Codes(*by_row, second_order.transpose(0, 1).contiguous())
        row, column = outlier[:, :rows].T.nonzero(as_tuple=True)
        return _checked(Quantised(found, row, column, added[column, row].to(torch.float16), order))

    def _threshold(self, weight: Float[Tensor, "columns padded"], diagonal: Tensor, rows: int) -> float:
        """The gain that a share `outliers` of the weights exceeds: midway between two weights' gains."""
        weights = rows * len(weight)
        outliers = round(self.outliers * weights)
        if outliers in (0, weights):
            return -torch.inf if outliers else torch.inf
        gains = leave_one_out_gains(weight, diagonal, self.group)[:, :rows].reshape(-1).numpy()
        around = (weights - outliers - 1, weights - outliers)
        gains.partition(around)  # in place: they may take as much as the weight
        return float(gains[[*around]].mean(dtype=float))


def _checked(found: Quantised) -> Quantised:
    """The matrix. Raises `UserError` if a weight, rounded as fp16 does, is not finite."""
    columns = TILE * found.codes.scales.shape[1]
    dense = spqr.decode(found.words, csr.no_outliers((len(found.codes.weights), columns)))
    if not bool(dense.isfinite().all() and found.values.isfinite().all()):
        raise UserError("cannot quantise: a weight near fp16's largest becomes infinite; divide the weights first")
    return found
