"""Which neurons of one layer fire, token after token, drawn at random: one door, `draw_layer`."""

import numpy as np
from jaxtyping import Float32, Int32, UInt8, UInt32

from toolkit.kernels.drawing import cpu
from toolkit.kernels.runtime.threads import over_rows

__all__ = ["FIRES", "KEEPS", "draw_layer"]

FIRES, KEEPS = cpu.FIRES, cpu.KEEPS
NOBODY = np.empty(0, np.int32)
NO_EVENTS = np.empty((0, 0), np.uint8)


def draw_layer(
    usage: Float32[np.ndarray, " neurons"],
    persistence: float,
    tokens: int,
    seeds: UInt32[np.ndarray, " neurons"],
    parents: Int32[np.ndarray, " neurons"] = NOBODY,
    before: UInt8[np.ndarray, "tokens neurons_before"] = NO_EVENTS,
    copied: float = 0.0,
    changes: tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"], Float32[np.ndarray, " n"]] | None = None,
) -> tuple[UInt8[np.ndarray, "tokens neurons"], UInt8[np.ndarray, "tokens neurons"]]:
    """Which neurons are active (1 or 0), and the events that made them so, for the layer behind this one.

    An event makes a neuron fire (`FIRES` and `KEEPS` are set), keep what it did for the token before (`KEEPS`), or stay
    idle (0). The first two have the chances `usage` · (1 − `persistence`) and `persistence`, so that a neuron is active
    for `usage` of the tokens. For the first token the chances are `usage` and 0.

    Args:
        usage: the share of tokens that each neuron is active for.
        persistence: the correlation of one token and the next, from 0 to 1.
        tokens: how many to draw.
        seeds: of each neuron's random numbers (xorshift, 64 bits), not 0. The result depends on no number of threads.
        parents: of each neuron in the layer before, with the same usage. Both keep their law, whatever is copied.
        before: the events of the layer before.
        copied: the chance with which a neuron takes its parent's event.
        changes: tokens (rising), neurons and usages: from that token on, the neuron has that usage.
    """
    neurons = len(usage)
    linked = copied > 0
    assert (usage.dtype, seeds.dtype, len(seeds)) == (np.float32, np.uint64, neurons), "usage, seeds"
    if linked:
        assert (parents.dtype, len(parents), len(before)) == (np.int32, neurons, tokens), "parents"
        assert 0 <= parents.min() <= parents.max() < before.shape[1], "parents beyond the layer before"
    when, which, what = changes or (NOBODY, NOBODY, np.empty(0, np.float32))
    active, events = np.empty((tokens, neurons), np.uint8), np.empty((tokens, neurons), np.uint8)
    chances = np.float32(persistence), np.float32(copied if linked else -1)
    given = parents if linked else NOBODY, before if linked else NO_EVENTS
    over_rows(
        cpu.draw,
        neurons,
        active.nbytes,
        usage.copy(),
        seeds.copy(),
        *chances,
        *given,
        when,
        which,
        what,
        active,
        events,
    )
    return active, events
