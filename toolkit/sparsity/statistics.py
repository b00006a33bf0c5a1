"""Statistics of a trace, as tidy tables with a row for each layer and place on an axis; files of usage.

The names are those of LLM in a flash (section 3, figures 4 and 9). Sequences of a trace are never joined: no pair
or window of tokens reaches from one into another.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from torch import Tensor

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.progress import progress
from toolkit.sparsity.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

USAGE, VERSION = "usage of neurons", "1"


def sparsity(trace: Trace) -> "pd.DataFrame":
    """How many neurons are active a token.

    Columns: layer, neurons, sparsity (share of zeros), active (mean a token), fewest, most (over tokens), never (share
    of the neurons that no token used).
    """
    rows = []
    for layer, count in enumerate(trace.units):
        a_token = _counts(trace.bits[layer].numpy())
        used = np.bitwise_or.reduce(trace.bits[layer].numpy(), axis=(0, 1))
        row = {"layer": layer, "neurons": count, "sparsity": 1 - a_token.mean() / count, "active": a_token.mean()}
        row |= {"fewest": a_token.min(), "most": a_token.max(), "never": 1 - _counts(used) / count}
        rows.append(row)
    return _frame(rows)


def aggregated_usage(trace: Trace, tokens: int) -> "pd.DataFrame":
    """The share of neurons that k tokens in a row use, s_agg(k), for k from 1 to `tokens`: the mean over all windows.

    Columns: layer, tokens (k), used, most (the share in the window that uses the most: a layer's memory, Req), new
    (s_agg(k) − s_agg(k − 1): what one token more has to load). Raises `UserError` for fewer than 1 token, or more than
    a sequence has.
    """
    _expect_within(trace, "tokens", [tokens], 1)
    rows = []
    with progress("aggregating usage", trace.layers, "layers") as bar:
        for layer, count in enumerate(trace.units):
            bits, before = trace.bits[layer].numpy(), 0.0
            union = bits.copy()
            for k in range(1, tokens + 1):
                if k > 1:
                    union = union[:, :-1] | bits[:, k - 1 :]
                shares = _counts(union) / count
                used = shares.mean()
                rows.append({"layer": layer, "tokens": k, "used": used, "most": shares.max(), "new": used - before})
                before = used
            bar.update()
    return _frame(rows)


def overlap(trace: Trace, distances: Sequence[int]) -> "pd.DataFrame":
    """The share of a token's neurons that an earlier token used, too: over all pairs of tokens at each distance.

    Columns: layer, distance (in tokens), shared (of the later token's neurons), jaccard (both over either), chance
    (`shared` if tokens were independent and neurons kept their frequencies). Raises `UserError` for a distance below 1,
    or one that no sequence has.
    """
    _expect_within(trace, "distance", [distance + 1 for distance in distances], 2)
    rows = []
    for layer in range(trace.layers):
        bits = trace.bits[layer].numpy()
        usage = usage_of(trace, layer)
        chance = float((usage**2).sum() / usage.sum()) if usage.any() else np.nan
        for distance in distances:
            earlier, later = bits[:, :-distance], bits[:, distance:]
            both, either = _counts(earlier & later).sum(), _counts(earlier | later).sum()
            row = {"layer": layer, "distance": distance, "shared": _ratio(both, _counts(later).sum())}
            rows.append(row | {"jaccard": _ratio(both, either), "chance": chance})
    return _frame(rows)


def usage_of(trace: Trace, layer: int) -> Float[Tensor, " neurons"]:
    """The share of tokens that each neuron, or expert, was active for."""
    return trace.active(layer).flatten(0, 1).double().mean(0)


def _counts(packed: np.ndarray) -> np.ndarray:
    """How many bits are set along the last axis."""
    return np.bitwise_count(packed).sum(axis=-1, dtype=np.int64)


def _frame(rows: Sequence[Mapping]) -> "pd.DataFrame":
    import pandas as pd  # not needed to run a model, which loads usage alone

    return pd.DataFrame(rows)


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else np.nan


def _expect_within(trace: Trace, name: str, tokens: Sequence[int], fewest: int) -> None:
    """Raise `UserError` unless every sequence has so many tokens."""
    length = trace.tokens.shape[1]
    if wrong := [count for count in tokens if not fewest <= count <= length]:
        raise UserError(f"{name}: {wrong[0]} tokens are needed; expected {fewest} to {length}, a sequence's length")


def save_usage(path: str | os.PathLike, model: str, layers: Sequence[Float[Tensor, " neurons"]]) -> None:
    """Write how often text uses each neuron of a model (`usage_of`): the most used neurons are its hot ones.

    Raises `UserError` for trouble with the disk.
    """
    tensors = {str(layer): shares for layer, shares in enumerate(layers)}
    tensor_files.save(path, USAGE, {"version": VERSION, "model": model}, tensors)


def load_usage(path: str | os.PathLike, model: str) -> list[Float[Tensor, " neurons"]]:
    """The usage of this model's neurons, by layer.

    Raises `UserError` for a file that is damaged, inconsistent, of another kind or about another model.
    """
    _, tensors = tensor_files.load_for(path, USAGE, (VERSION,), model)
    with tensor_files.consistent(path, USAGE):
        return [tensors[str(layer)] for layer in range(len(tensors))]
