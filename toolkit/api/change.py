"""`toolkit.prune` and `toolkit.quantise`: change the weights of a model in memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from toolkit.api.tokenizer import tokenizer_of
from toolkit.errors import UserError, unknown

if TYPE_CHECKING:
    from torch import nn

    from toolkit.sparsity import LayerStatistics
    from toolkit.sparsity.layerwise import WeightChange
    from toolkit.sparsity.methods import PruningMethod

TEXT, WINDOWS, SEQUENCE_LENGTH = "wiki-slice", 16, 1024  # of calibration, as `pack` has them
STORED = "stored_matrix"  # the attribute of a linear that `quantise` has changed


def prune(
    model: "nn.Module",
    method: "str | PruningMethod" = "wanda",
    sparsity: float = 0.5,
    pattern: str | None = None,
    corpus: str = TEXT,
    windows: int = WINDOWS,
    sequence_length: int = SEQUENCE_LENGTH,
    tokenizer: object | None = None,
) -> "list[LayerStatistics]":
    """Set weights of all decoder linears to zero, in place; return one record per linear. Embeddings and head stay.

    Args:
        model: as `load_model` gives it, or any decoder of transformers.
        method: "wanda" (Sun et al., 2024), "sparsegpt" (Frantar and Alistarh, 2023), "magnitude", or a method of yours.
        sparsity: share of zeros, 0 to 1.
        pattern: "N:M" keeps N of every M consecutive inputs and decides the sparsity.
        corpus: calibration text, "wiki-slice", "python-sources", "wikitext-2" or "c4", or several joined by "+".
            Magnitude needs none.
        windows: how many windows of it are drawn.
        sequence_length: tokens of a window.
        tokenizer: None takes the one of the folder or file that the model was loaded from.

    Raises `UserError` before any weight changes for an unknown method, a share or pattern that does not fit the model,
    too little text, and a model without a tokenizer.
    """
    from toolkit.sparsity.layerwise import Pruning

    text = (corpus, windows, sequence_length)
    return _changed(model, Pruning.by(method, sparsity, pattern), text, tokenizer)


def quantise(
    model: "nn.Module",
    method: "str | WeightChange" = "spqr",
    corpus: str = TEXT,
    windows: int = WINDOWS,
    sequence_length: int = SEQUENCE_LENGTH,
    tokenizer: object | None = None,
    **settings: float,
) -> "list[LayerStatistics]":
    """Round weights of all decoder linears to few bits, in place; return one record per linear. `pack` keeps the bits.

    Args:
        model: as `prune` takes it, and so are the other parameters.
        method: "spqr" (3 bits and outliers; Dettmers et al., 2023), "gptq" (Frantar et al., 2022), "rtn" (round to
            nearest), or a quantiser of yours.
        settings: of the method by name: `outliers` (a share, 0.01) of "spqr"; `bits` and `group` (weights with one
            scale) of "gptq" (3, 64) and "rtn" (4, 64).

    Raises `UserError` as `prune` does, and for a setting that the method does not have.
    """
    from toolkit.sparsity.layerwise import Pruning

    change = _quantiser(method, settings)
    if isinstance(change, Pruning):
        raise UserError(f"{change}: sets weights to zero; call prune")
    return _changed(model, change, (corpus, windows, sequence_length), tokenizer)


def _changed(
    model: "nn.Module", change: "WeightChange", text: tuple[str, int, int], tokenizer: object | None
) -> "list[LayerStatistics]":
    """Change a model, and leave the matrix that a quantiser has chosen at each linear."""
    from torch import nn

    from toolkit.models import decoder_blocks, decoder_linears
    from toolkit.sparsity import Calibration
    from toolkit.sparsity.layerwise import DenseMatrix, change_blocks

    if not isinstance(model, nn.Module):
        raise UserError(f"model {model!r:.99}: expected a model in memory, such as load_model gives")
    drawn = Calibration(*text).draw_from_corpus(tokenizer or tokenizer_of(model)) if change.statistic else None
    records = []
    for block, changed in zip(decoder_blocks(model), change_blocks(model, change, drawn), strict=True):
        records += changed.statistics
        for op, linear in decoder_linears(block).items():
            matrix = changed.matrices[op]
            kept = None if isinstance(matrix, DenseMatrix) else (matrix, linear.weight._version)
            setattr(linear, STORED, kept)
    return records


def _quantiser(method: "str | WeightChange", settings: Mapping[str, float]) -> "WeightChange":
    from toolkit.quantization.gptq import GPTQ
    from toolkit.quantization.rtn import RoundToNearest
    from toolkit.quantization.spqr import SpQR

    grid = ("bits", "group")
    known = {"spqr": (SpQR, ("outliers",)), "gptq": (GPTQ, grid), "rtn": (RoundToNearest, grid)}
    if isinstance(method, str) and method not in known:
        raise unknown("quantiser", method, known)
    made, names = known[method] if isinstance(method, str) else (lambda: method, ())
    for name in settings:
        if name not in names:
            raise unknown(f"setting of {method}", name, names)
    return made(**settings)
