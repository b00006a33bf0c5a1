"""Routing replayed against a cache of experts and neurons: hits, prefetches and what they waste, without a disk.

    tokens = [{0: None, 5: None}, {0: None, 2: None}]        # whole experts
    counts = replay_experts(tokens, TwoLevel(experts=128, neurons=1, slots=32))
    rates(counts, neuron_bytes=3_059_712)

The engine's slots make the same changes for the same tokens, to the count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields

import numpy as np
import pandas as pd

from toolkit.errors import UserError
from toolkit.policies.two_level import CacheCounts, Needed, TwoLevel

COUNTS = tuple(field.name for field in fields(CacheCounts))  # of experts, and with "neurons_" before them of neurons


def replay_experts(
    tokens: Sequence[Needed], cache: TwoLevel, expected: Sequence[Needed | None] | None = None
) -> pd.DataFrame:
    """A row for each token of a layer: what it adds to the counts of the cache.

    Args:
        tokens: the experts and neurons that each needs.
        cache: goes on from what it holds, and holds nothing in the end.
        expected: what is prefetched before each token, the likeliest first; None: nothing.

    Columns: needed, late, prefetched and wasted experts, as `CacheCounts` has them, and the same of neurons as
    neurons_needed and so on. Experts prefetched and never needed count as wasted at the last token.

    Raises what `TwoLevel.step` raises, and `UserError` for another number of expectations than tokens.
    """
    if expected is not None and len(expected) != len(tokens):
        raise UserError(f"{len(expected)} expectations for {len(tokens)} tokens: expected one each")
    totals = [_totals(cache)]
    for number, needed in enumerate(tokens):
        if expected is not None and (ahead := expected[number]) is not None:
            cache.admit(ahead)
        cache.step(needed)
        if number == len(tokens) - 1:
            cache.clear()
        totals.append(_totals(cache))
    return pd.DataFrame(np.diff(np.array(totals), axis=0), columns=[*COUNTS, *(f"neurons_{name}" for name in COUNTS)])


def _totals(cache: TwoLevel) -> list[int]:
    return [*astuple(cache.of_experts), *astuple(cache.of_neurons)]


def rates(counts: pd.DataFrame, neuron_bytes: int) -> Mapping[str, float]:
    """Hit rates of experts and neurons, and bytes a token, over the rows of one layer or of several.

    expert_hits and neuron_hits are shares of those needed that were in memory then, prefetched ones among them. Bytes
    are means of a row: loaded_bytes (all), prefetched_bytes and wasted_bytes of these.
    """
    total = counts.sum()
    found = {"expert_hits": _rate(total["needed"] - total["late"], total["needed"])}
    found |= {"neuron_hits": _rate(total["neurons_needed"] - total["neurons_late"], total["neurons_needed"])}
    each = {name: neuron_bytes * _rate(total[f"neurons_{name}"], len(counts)) for name in COUNTS[1:]}
    found |= {"loaded_bytes": each["late"] + each["prefetched"]}
    return found | {"prefetched_bytes": each["prefetched"], "wasted_bytes": each["wasted"]}


def _rate(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")
