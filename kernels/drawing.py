"""Which neurons of one layer fire, token after token, drawn at random: one door, `draw_layer`.

LLVM vectorises the loops over neurons.
"""

import numba
import numpy as np
from jaxtyping import Float32, Int32, UInt8, UInt32

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.parallel import over_rows

FIRES, KEEPS = 1, 2  # bits of an event
STEP = np.float32(2.0**-24)  # random numbers have 24 bits
NOBODY = np.empty(0, np.int32)
NO_EVENTS = np.empty((0, 0), np.uint8)


@numba.njit(inline="always")
def follow(state):
    """The next state of a xorshift generator (Marsaglia, 2003)."""
    state ^= state << numba.uint64(13)
    state ^= state >> numba.uint64(7)
    return state ^ (state << numba.uint64(17))


@numba.njit(inline="always")
def upper(state):
    """A number from 0 to 1 from the upper 24 bits of a state."""
    return numba.float32(numba.int32(state >> numba.uint64(40))) * STEP


@numba.njit(inline="always")
def lower(state):
    """A number from 0 to 1 from the lower 24 bits of a state."""
    return numba.float32(numba.int32(state & numba.uint64(0xFFFFFF))) * STEP


@numba.njit(inline="always")
def event_of(number, usage, persistence):
    """`FIRES` with `KEEPS`, `KEEPS`, or 0."""
    fires = usage * (numba.float32(1) - persistence)
    return numba.uint8(number < fires) | numba.uint8(numba.uint8(number < fires + persistence) << numba.uint8(1))


@compiled
def draw_events(events, states, usage, persistence):
    """Step the generators, and turn their numbers into events."""
    for i in range(len(events)):
        states[i] = follow(states[i])
        events[i] = event_of(upper(states[i]), usage[i], persistence)


@compiled
def gather(out, values, places):
    """A separate loop, since LLVM vectorises the other loops only without it."""
    for i in range(len(out)):
        out[i] = values[places[i]]


@compiled
def copy_events(events, states, copied, theirs):
    """Take the parent's event with chance `copied`."""
    for i in range(len(events)):
        mine, other = events[i], theirs[i]  # both are read, so that there is no branch
        events[i] = other if lower(states[i]) < copied else mine


@compiled
def follow_events(active, events, earlier):
    """Activity after an event. The first token's events keep nothing, so `earlier` does not matter there."""
    for i in range(len(active)):
        active[i] = (events[i] | (events[i] >> numba.uint8(1)) & earlier[i]) & numba.uint8(1)


@compiled
def draw(usage, states, persistence, copied, parents, before, when, which, what, active, events, first, last):
    """Fill `active` and `events` for neurons `first` to `last`; `copied` is below 0 where there are no parents."""
    change = 0
    shares, states = usage[first:last], states[first:last]  # slices begin at 0, so that LLVM vectorises
    for token in range(len(active)):
        while change < len(when) and when[change] <= token:
            if first <= which[change] < last:
                usage[which[change]] = what[change]
            change += 1
        row, result = events[token, first:last], active[token, first:last]
        draw_events(row, states, shares, persistence if token else numba.float32(0))
        if copied >= 0:
            gather(result, before[token], parents[first:last])
            copy_events(row, states, copied, result)
        follow_events(result, row, active[max(0, token - 1), first:last])


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

    An event makes a neuron fire (`FIRES` and `KEEPS` are set), repeat its activity of the token before (`KEEPS`), or
    stay idle (0). The first two have the chances `usage` · (1 − `persistence`) and `persistence`, so that a neuron is
    active for `usage` of the tokens. For the first token the chances are `usage` and 0.

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
        draw, neurons, active.nbytes, usage.copy(), seeds.copy(), *chances, *given, when, which, what, active, events
    )
    return active, events
