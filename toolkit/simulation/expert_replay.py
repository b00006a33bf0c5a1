"""Routing replayed against a cache of experts and neurons: hits, prefetches and what they waste, without a disk.

    tokens = needed_of(trace, layer=0)                       # whole experts
    counts = replay_experts(tokens, TwoLevel(experts=128, neurons=1, slots=32))
    rates(counts, neuron_bytes=3_059_712)

The engine's slots make the same changes for the same tokens, to the count.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int64

from toolkit.activations.synthetic import Law, draw
from toolkit.activations.trace import Trace
from toolkit.errors import UserError
from toolkit.policies.residency import Residency
from toolkit.policies.two_level import CacheCounts, Needed, TwoLevel
from toolkit.simulation.replay import replay, units_of

log = logging.getLogger(__name__)

COUNTS = tuple(field.name for field in fields(CacheCounts))  # of experts, and with "neurons_" before them of neurons


def needed_of(trace: Trace, layer: int) -> list[Needed]:
    """The experts that each token of a trace's first sequence uses in a layer, whole."""
    return [dict.fromkeys(experts.tolist()) for experts in units_of(trace.active(layer)[0].numpy())]


def with_drawn_neurons(tokens: Sequence[Needed], law: Law, experts: int, neurons: int, seed: int = 0) -> list[Needed]:
    """The same experts with neurons drawn from a law of usage, whose tokens are the uses of an expert, in order."""
    uses = np.zeros(experts, dtype=np.int64)
    counted = []
    for token in tokens:
        counted.append([(expert, int(uses[expert])) for expert in token])
        uses[list(token)] += 1
    length = max(1, int(uses.max(initial=1)))
    active = draw("drawn", [law], experts * neurons, length, seed=seed).active(0)[0].numpy()
    by_expert = active.reshape(length, experts, neurons)
    return [{expert: np.flatnonzero(by_expert[use, expert]) for expert, use in token} for token in counted]


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


def replay_global(
    trace: Trace, rows: int, policy: Callable[[int, int, Sequence[Int64[np.ndarray, " needed"]]], Residency]
) -> pd.DataFrame:
    """One cache for the experts of all layers: a row for each token and layer, in the order that a model computes them.

    `policy(units, rows, needed)` gives the residency; expert e of layer l is unit l · experts + e, and `needed` lists
    what each layer of each token needs, for Belady. Only the first sequence is replayed. Warns if the cache holds less
    than a token needs of all layers: then LRU drops each expert before the next token comes to its layer.

    Columns: those of `replay`, and layer, needed. Raises `UserError` for layers of different sizes.
    """
    if len(set(trace.units)) != 1:
        raise UserError(f"layers of {sorted(set(trace.units))} experts: expected as many in each layer")
    steps = _in_order([trace.active(layer)[0].numpy() for layer in range(trace.layers)], trace.units[0])
    cycle = max(map(sum, zip(*[iter(map(len, steps))] * trace.layers, strict=True)))
    if rows < cycle:
        log.warning(
            "a cache of %d experts for all layers holds less than a token needs, %d: LRU will miss", rows, cycle
        )
    table = replay(steps, policy(sum(trace.units), rows, steps))
    table = table.assign(layer=table["token"] % trace.layers, needed=[len(step) for step in steps])
    return table.assign(token=table["token"] // trace.layers)


def _in_order(active: Sequence[Bool[np.ndarray, "tokens experts"]], experts: int) -> list[Int64[np.ndarray, " needed"]]:
    """The units of one cache that each layer of each token needs."""
    by_layer = [units_of(each) for each in active]
    return [needed + layer * experts for token in zip(*by_layer, strict=True) for layer, needed in enumerate(token)]


def _rate(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")
