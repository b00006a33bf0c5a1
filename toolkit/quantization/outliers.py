"""How the outliers of a model that SpQR quantised are spread over rows, layers and operations (SpQR, figure 3.3)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from toolkit.cache import kept
from toolkit.errors import UserError, unknown
from toolkit.kernels import csr
from toolkit.models import decoder_blocks, decoder_linears, fast_dtype, load_model
from toolkit.progress import progress
from toolkit.quantization.spqr import Quantised, SpQR
from toolkit.sparsity.calibration import Calibration, checked_windows
from toolkit.sparsity.changed import ChangedModel, weights_sha256
from toolkit.sparsity.grams import walk

if TYPE_CHECKING:
    import pandas as pd


def outliers_of(quantised: ChangedModel) -> Iterator[tuple[int, str, csr.Outliers]]:
    """The number of the decoder block, the operation's name in it and its outliers, for every decoder linear."""
    for layer in range(len(quantised.folders)):
        for name, matrix in quantised.matrices(layer).items():
            yield layer, _op(name), cast(Quantised, matrix).outliers


def matrix_of(quantised: ChangedModel, layer: int, op: str) -> Quantised:
    """The quantised matrix of an operation, such as "q_proj". Raises `UserError` for one that is not there."""
    matrices = {_op(name): matrix for name, matrix in _block(quantised, layer).items()}
    if op not in matrices:
        raise unknown("operation", op, matrices)
    return matrices[op]


def _op(name: str) -> str:
    """The last part of a linear's dotted name, such as "q_proj"."""
    return name.rpartition(".")[2]


def _block(quantised: ChangedModel, layer: int) -> dict[str, Quantised]:
    if not 0 <= layer < len(quantised.folders):
        raise UserError(f"layer is {layer}; expected 0 to {len(quantised.folders) - 1}, the model's blocks")
    return cast(dict[str, Quantised], quantised.matrices(layer))


def row_counts(outliers: csr.Outliers) -> np.ndarray:
    """How many outliers each row has."""
    rows, _, _ = outliers.entries()
    return torch.bincount(rows, minlength=outliers.shape[0]).numpy()


def layer_densities(quantised: ChangedModel, layer: int) -> dict[str, list[int]]:
    """Outliers of each row of one block's matrices, by operation. Raises `UserError` for a block that is not there."""
    matrices = _block(quantised, layer)
    return {_op(name): row_counts(matrix.outliers).tolist() for name, matrix in matrices.items()}


@kept("measured", key=lambda model_name: {"weights_sha256": weights_sha256(load_model(model_name, fast_dtype())[0])})
def sensitive_shares(model_name: str, share: float, calibration: Calibration) -> "pd.DataFrame":
    """`sensitive_share` of every decoder linear of a dense model, kept: layer, op, share, worst_percent."""
    import pandas as pd  # not needed to run a model

    model, tokenizer = load_model(model_name, fast_dtype())
    windows = checked_windows(model, calibration.draw_from_corpus(tokenizer))
    rows, blocks = [], decoder_blocks(model)
    with progress("errors of rounding", len(blocks), "blocks") as bar:
        for layer, (block, grams) in enumerate(walk(model, windows)):
            for name, linear in decoder_linears(block).items():
                worst = sensitive_share(linear.weight, grams[name], share)
                rows.append((layer, _op(name), share, worst))
            bar.update()
    return pd.DataFrame(rows, columns=["layer", "op", "share", "worst_percent"])


def sensitive_share(weight: Tensor, gram: Tensor, share: float, damping: float = SpQR.damping) -> float:
    """The percentage of a matrix's quantisation error that comes from its worst weights, a given share of all weights.

    The error of weight (i, j) is (w − ŵ)² / [H⁻¹]ⱼⱼ (thesis, chapter 2), where ŵ is w in 3 bits without any outliers,
    and H is `gram` = XᵀX, damped. 0 where nothing is lost.
    """
    hessian = gram.double() + damping * gram.diagonal().double().mean() * torch.eye(len(gram), dtype=torch.float64)
    rounded = SpQR(outliers=0).round(weight.float()).decode()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    errors = (weight.float() - rounded).double().square() / inverse.diagonal()
    worst = errors.flatten().topk(max(1, round(share * errors.numel()))).values
    return 100 * float(worst.sum() / errors.sum()) if errors.sum() else 0.0
