"""States of 4 bits for any CPU: plain loops, which LLVM vectorises for the CPU at hand."""

import numba

from toolkit.kernels.runtime.compiled import compiled

HIGHEST = 15
TOP, HALF = numba.uint8(HIGHEST), numba.uint8(4)  # the highest state, and the bits that one takes


@numba.njit(inline="always")
def moved(state, active, gain, loss):
    """The state after a token."""
    raised = min(numba.uint8(state + gain), TOP)
    return raised if active else numba.uint8(state - min(state, loss))


@compiled
def observe(table, active, gain, loss):
    """Move all states by one token."""
    lower, upper = active[: len(table)], active[len(table) :]
    for i in range(len(upper)):
        low = moved(numba.uint8(table[i] & TOP), lower[i], gain, loss)
        high = moved(numba.uint8(table[i] >> HALF), upper[i], gain, loss)
        table[i] = low | (high << HALF)
    if len(upper) < len(table):
        table[-1] = moved(numba.uint8(table[-1] & TOP), lower[-1], gain, loss)


@compiled
def count(first, second, active, out):
    """How many of its two parents are active, for each neuron."""
    for i in range(len(out)):
        out[i] = active[first[i]] + active[second[i]]


@compiled
def predict(table, threshold, weight, out):
    """Replace the number of active parents by 1 where the sum reaches the threshold, and else by 0."""
    lower, upper = out[: len(table)], out[len(table) :]
    for i in range(len(lower)):
        lower[i] = numba.uint8((table[i] & TOP) + weight * lower[i]) >= threshold
    for i in range(len(upper)):
        upper[i] = numba.uint8((table[i] >> HALF) + weight * upper[i]) >= threshold
