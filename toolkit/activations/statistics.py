"""Statistics of a trace, as tidy tables with a row for each layer and place on an axis.

The names are those of LLM in a flash (section 3, figures 4, 9 and 12). Sequences of a trace are never joined: no pair
or window of tokens reaches from one into another.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.activations.trace import Trace
from toolkit.errors import UserError
from toolkit.progress import progress

ROWS_AT_ONCE = 1024  # neurons whose co-activations with all others are held together


def sparsity(trace: Trace) -> pd.DataFrame:
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
    return pd.DataFrame(rows)


def aggregated_usage(trace: Trace, tokens: int) -> pd.DataFrame:
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
    return pd.DataFrame(rows)


def overlap(trace: Trace, distances: Sequence[int]) -> pd.DataFrame:
    """How many of a token's neurons a token some way before it used, too, over all pairs of tokens at that distance.

    Columns: layer, distance (in tokens), shared (of the later token's neurons), jaccard (both over either), chance
    (what `shared` would be if tokens knew nothing of each other, but neurons kept their frequencies). Raises
    `UserError` for a distance below 1, or one that no sequence has.
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
    return pd.DataFrame(rows)


def hot_cold(trace: Trace, points: int = 20) -> pd.DataFrame:
    """The share of all activations that the most used neurons make up.

    Columns: layer, neurons (share of the layer, the most used first, in `points` equal steps), activations (their share
    of all), usage (share of tokens that the last of them was active for).
    """
    rows = []
    for layer, count in enumerate(trace.units):
        usage = usage_of(trace, layer).sort(descending=True).values
        total = usage.cumsum(0)
        for point in range(1, points + 1):
            last = max(1, round(count * point / points)) - 1
            row = {"layer": layer, "neurons": (last + 1) / count, "usage": usage[last].item()}
            rows.append(row | {"activations": _ratio(total[last].item(), total[-1].item())})
    return pd.DataFrame(rows)


def coactivation(trace: Trace, layer: int) -> Float[Tensor, "neurons neurons"]:
    """[i, j] is the share of neuron i's tokens for which j was active as well; the diagonal is 0, unused rows are 0.

    It holds neurons² fp32 numbers: 1 GB for 16384 neurons. Raises `UserError` for a layer that is not there.
    """
    if not 0 <= layer < trace.layers:
        raise UserError(f"layer {layer}: the trace has layers 0 to {trace.layers - 1}")
    active = trace.active(layer).flatten(0, 1).float()
    uses = active.sum(0)
    together = torch.empty(trace.units[layer], trace.units[layer])
    for rows in torch.arange(trace.units[layer]).split(ROWS_AT_ONCE):
        torch.matmul(active[:, rows].T, active, out=together[rows[0] : rows[-1] + 1])
    return together.div_(uses.clamp(min=1)[:, None]).fill_diagonal_(0)


def friends(trace: Trace, layer: int, ranks: Iterable[int]) -> pd.DataFrame:
    """How often a neuron's closest friends are active with it: a row for each neuron that was used, and rank.

    The closest friend, rank 1, is the neuron that is most often active with it (appendix D). Columns: layer, neuron,
    rank, friend, together (share of the neuron's tokens), usage (share of all tokens that the friend is active for:
    what `together` would be by chance). Raises `UserError` for a rank that no other neuron can have.
    """
    ranks = list(ranks)
    if not ranks or min(ranks) < 1 or max(ranks) >= trace.units[layer]:
        raise UserError(f"ranks {ranks}: expected numbers from 1 to {trace.units[layer] - 1}, the other neurons")
    shares, found = coactivation(trace, layer).topk(max(ranks), dim=1)
    usage = usage_of(trace, layer)
    used = usage.nonzero().squeeze(1)
    tables = []
    for rank in ranks:
        friend = found[used, rank - 1]
        columns = {"layer": layer, "neuron": used, "rank": rank, "friend": friend}
        tables.append(pd.DataFrame(columns | {"together": shares[used, rank - 1], "usage": usage[friend]}))
    return pd.concat(tables, ignore_index=True)


def usage_of(trace: Trace, layer: int) -> Float[Tensor, " neurons"]:
    """The share of tokens that each neuron, or expert, was active for."""
    return trace.active(layer).flatten(0, 1).double().mean(0)


def _counts(packed: np.ndarray) -> np.ndarray:
    """How many bits are set along the last axis."""
    return np.bitwise_count(packed).sum(axis=-1, dtype=np.int64)


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else np.nan


def _expect_within(trace: Trace, name: str, tokens: Sequence[int], fewest: int) -> None:
    """Raise `UserError` unless every sequence has so many tokens."""
    length = trace.tokens.shape[1]
    if wrong := [count for count in tokens if not fewest <= count <= length]:
        raise UserError(f"{name}: {wrong[0]} tokens are needed; expected {fewest} to {length}, a sequence's length")
