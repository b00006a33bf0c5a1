"""The walk over bundles that all backends share."""

from collections.abc import Callable

import numba
import numpy as np

from toolkit.kernels.engine.activations import ACTIVATIONS, gelu, gelu_tanh, relu, relu2, silu
from toolkit.kernels.engine.compiled import compiled

ROWS = 4  # neurons at once
AHEAD = 2 * ROWS  # neurons whose places are known: those at hand and the next ones
RELU, RELU2, SILU, GELU, GELU_TANH = range(5)
KINDS = {relu: RELU, relu2: RELU2, silu: SILU, gelu: GELU, gelu_tanh: GELU_TANH}
NUMBERS = {name: KINDS[activation] for name, activation in ACTIVATIONS.items()}  # by which kernels know activations


def _of_each(activation: Callable) -> Callable:
    @numba.njit(inline="always")
    def of_each(sums, rows):
        for vector in range(len(sums)):
            for i in range(rows):
                sums[vector, i] = activation(sums[vector, i])

    return of_each


of_relu, of_relu2, of_silu, of_gelu, of_gelu_tanh = map(_of_each, KINDS)


@compiled
def activate(number, sums, rows):
    """Replace the first so many numbers of each row by those of the activation.

    Its number is told at each call: a kernel of its own for each activation would take seconds to compile.
    """
    if number == RELU:
        of_relu(sums, rows)
    elif number == RELU2:
        of_relu2(sums, rows)
    elif number == SILU:
        of_silu(sums, rows)
    elif number == GELU:
        of_gelu(sums, rows)
    else:
        of_gelu_tanh(sums, rows)


@compiled
def add_up(partials, sums):
    """Add the parts to `sums` [vectors, hidden], in their order."""
    for part in range(len(partials)):
        for vector in range(len(sums)):
            for column in range(sums.shape[1]):
                sums[vector, column] += partials[part, vector, column]


@numba.njit(inline="always")
def as_they_are(bundles, x):
    """Rows of dense numbers need no preparation."""
    return bundles


@numba.njit(inline="always")
def dense_start(part, width, hidden):
    """Where in a dense row the numbers of gate (0), up (1) and down (2) begin. Without a gate up is 0."""
    return part * hidden if part < 2 else width - hidden


@numba.njit(inline="always")
def no_request(bundles, place, hidden):
    """Down columns of dense numbers need no prefetch."""


def ffn_of_parts(
    multiply,
    add_columns,
    start: Callable = dense_start,
    prepare: Callable = as_they_are,
    request: Callable = no_request,
):
    """The function that adds to `partials[part, vector]` the sum over a part's neurons, for parts `first` to `last`.

    It is told which of `NUMBERS` the activation has, and whether there is a gate, as 1 or 0.
    `listed` says which rows of the bundles count, in which order: part p has those from `starts[p]` up to, not
    including, `starts[p + 1]`. `wanted[vector, i]` says whether a vector wants the listed row i; without any
    `wanted` all do. Four rows are multiplied at once. A neuron is active if its value for any vector that wants it
    exceeds the threshold; values that do not count as zero. Down columns are added one after the other, in the order of
    the list, also where four are read at once; those of neurons that are not active are not read. So sums depend
    neither on where rows lie nor on how many calls add them up.

    The backend's two functions work for 4 or 1 neurons (`rows`):

    - `multiply(bundles, places, rows, x, y, place)` sets `y[vector, place + i]` to the product of each vector with the
      numbers from `bundles.flat[places[i]]` on; the other ones of eight `places` are used later.
    - `add_columns(bundles, places, values, first, rows, sums)` adds to `sums[vector]` the numbers from
      `bundles.flat[places[i]]` on, times `values[vector, i]`, for i from `first` on.

    Other kinds of rows have three more functions. `start(part, width, hidden)` is where the numbers of a part of a row
    begin. `prepare(bundles, x)` makes the `bundles` that the functions get, with scratch memory, say. `request(bundles,
    place, hidden)` prefetches the down column that is used four neurons later.
    """

    @compiled
    def find_active(
        bundles,
        width,
        listed,
        end,
        wanted,
        activation,
        gated,
        bias,
        x,
        threshold,
        at,
        rows,
        ahead,
        products,
        places,
        values,
        active,
    ):
        hidden = x.shape[1]
        for part in range(1 + gated):
            for i in range(AHEAD):
                ahead[i] = listed[min(at + i, end - 1)] * width + start(part, width, hidden)
            multiply(bundles, ahead, rows, x, products[part], 0)
        if len(bias):
            for i in range(rows):
                for vector in range(len(x)):
                    products[0, vector, i] += bias[listed[at + i]]
        activate(activation, products[0], rows)
        for i in range(rows):
            exceeds, row = False, listed[at + i]
            for vector in range(len(x)):
                value = products[0, vector, i]
                if gated:
                    value *= products[1, vector, i]
                counts = not abs(value) <= threshold  # a NaN counts
                if len(wanted):
                    counts = counts and wanted[vector, at + i]
                values[vector, active] = value if counts else numba.float32(0)
                exceeds = exceeds or counts
            if exceeds:
                places[active] = row * width + start(2, width, hidden)
                request(bundles, places[active], hidden)
                active += 1
        return active

    @compiled
    def ffn(bundles, listed, starts, wanted, activation, gated, bias, x, threshold, partials, first, last):
        vectors, width, given = len(x), bundles.shape[1], prepare(bundles, x)
        products, ahead = np.empty((2, vectors, ROWS), np.float32), np.empty(AHEAD, np.int64)
        for part in range(first, last):
            at, end = starts[part], starts[part + 1]
            places, values = np.empty(end - at, np.int64), np.empty((vectors, end - at), np.float32)
            active = added = numba.int64(0)
            while at < end:
                some = numba.int64(ROWS) if at + ROWS <= end else numba.int64(1)
                active = find_active(
                    given,
                    width,
                    listed,
                    end,
                    wanted,
                    activation,
                    gated,
                    bias,
                    x,
                    threshold,
                    at,
                    some,
                    ahead,
                    products,
                    places,
                    values,
                    active,
                )
                at += some
                while added + 2 * ROWS <= active:  # the last four have just been asked for
                    add_columns(given, places, values, added, numba.int64(ROWS), partials[part])
                    added += ROWS
            if added + ROWS <= active:
                add_columns(given, places, values, added, numba.int64(ROWS), partials[part])
                added += ROWS
            for last_ones in range(added, active):
                add_columns(given, places, values, last_ones, numba.int64(1), partials[part])

    return ffn
