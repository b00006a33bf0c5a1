"""The chains of a layer's neurons for any CPU: a loop over neurons for each token, which LLVM vectorises."""

import numba
import numpy as np

from toolkit.kernels.runtime.compiled import compiled

FIRES, KEEPS = 1, 2  # bits of an event
STEP = np.float32(2.0**-24)  # random numbers have 24 bits


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
    """A loop of its own, since LLVM vectorises the others only without it."""
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
