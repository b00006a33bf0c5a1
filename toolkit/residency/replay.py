"""Replay of traces: the units that each token loads and drops under a residency policy, without a disk or a model.

    tokens = replay([np.array([0, 1]), np.array([1, 2])], Lru(units=4, rows=2), unit_bytes=4096)
    tokens["loaded"].sum()
    counts = replay_experts([{0: None, 5: None}, {0: None, 2: None}], TwoLevel(experts=128, neurons=1, slots=32))
    rates(counts, neuron_bytes=3_059_712)

The engine makes the same changes for the same tokens, to the unit and to the count.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int64

from toolkit.residency.base import Residency
from toolkit.residency.two_level import CacheCounts, Needed, TwoLevel

COUNTS = tuple(field.name for field in fields(CacheCounts))  # of experts, and with "neurons_" before them of neurons


def replay(needed: Iterable[Int64[np.ndarray, " needed"]], residency: Residency, unit_bytes: int = 0) -> pd.DataFrame:
    """A row for each token, which needs these units: loaded, dropped and held units, and the bytes loaded.

    The policy goes on from what it holds. Raises what `Residency.step` raises.
    """
    rows = []
    for token, units in enumerate(needed):
        change = residency.step(units)
        loaded = len(change.loaded)
        rows.append((token, loaded, len(change.dropped), int(residency.held.sum()), loaded * unit_bytes))
    return pd.DataFrame(rows, columns=["token", "loaded", "dropped", "held", "bytes"])


def units_of(active: Bool[np.ndarray, "tokens units"]) -> list[Int64[np.ndarray, " needed"]]:
    """The units that are active for each token, rising."""
    return [np.flatnonzero(token) for token in active]


def most_held(needed: Iterable[Int64[np.ndarray, " needed"]], residency: Residency) -> int:
    """The most units that a policy holds at once over these tokens, at least 1 (Req in LLM in a flash, C.3)."""
    return max([1, *replay(needed, residency)["held"]])


def replay_experts(
    tokens: Sequence[Needed], cache: TwoLevel, expected: Sequence[Needed | None] | None = None
) -> pd.DataFrame:
    """A row for each token of a layer, which needs these experts and neurons: what it adds to the cache's counts.

    `expected` is prefetched before each token, the likeliest first. The cache goes on from what it holds, and holds
    nothing in the end: experts prefetched and never needed count as wasted at the last token. Columns: the fields of
    `CacheCounts` for experts, and for neurons with neurons_ before them. Raises what `TwoLevel.step` raises.
    """
    totals = [_totals(cache)]
    for needed, ahead in zip(tokens, expected or [None] * len(tokens), strict=True):
        if ahead is not None:
            cache.admit(ahead)
        cache.step(needed)
        totals.append(_totals(cache))
    cache.clear()
    totals[-1] = _totals(cache)
    return pd.DataFrame(np.diff(np.array(totals), axis=0), columns=[*COUNTS, *(f"neurons_{name}" for name in COUNTS)])


def _totals(cache: TwoLevel) -> list[int]:
    return [*astuple(cache.of_experts), *astuple(cache.of_neurons)]


def rates(counts: pd.DataFrame, neuron_bytes: int) -> Mapping[str, float]:
    """Hit rates of experts and neurons, and bytes a token, over the rows of one layer or of several.

    expert_hits and neuron_hits are shares of those needed that were in memory then, prefetched ones among them. Bytes
    are means of a row: loaded_bytes (all), prefetched_bytes and wasted_bytes of these.
    """
    experts, neurons = (CacheCounts(*counts[[f"{part}{name}" for name in COUNTS]].sum()) for part in ("", "neurons_"))
    late, prefetched, wasted = (neuron_bytes * (number / len(counts)) for number in astuple(neurons)[1:])
    hits = {"expert_hits": float(experts.hit_rate), "neuron_hits": float(neurons.hit_rate)}
    return hits | {"loaded_bytes": late + prefetched, "prefetched_bytes": prefetched, "wasted_bytes": wasted}
