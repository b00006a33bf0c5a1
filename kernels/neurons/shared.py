"""The walk over bundles that all backends share."""

from collections.abc import Callable

import numba
import numpy as np

from toolkit.kernels.engine.activations import ACTIVATIONS
from toolkit.kernels.engine.compiled import compiled

ROWS = 4  # neurons at once
AHEAD = 2 * ROWS  # neurons whose places are known: those at hand and the next ones


@compiled
def add_up(partials, sums):
    """Set `sums` [vectors, hidden] to the sum over the parts, in their order."""
    sums[:] = partials[0]
    for part in range(1, len(partials)):
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
    activation: str,
    gated: bool,
    start: Callable = dense_start,
    prepare: Callable = as_they_are,
    request: Callable = no_request,
):
    """The function that adds to `partials[part, vector]` the sum over a part's neurons, for parts `first` to `last`.

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
    activate = ACTIVATIONS[activation]

    @compiled
    def find_active(
        bundles, width, listed, end, wanted, bias, x, threshold, at, rows, ahead, products, places, values, active
    ):
        hidden = x.shape[1]
        for part in range(2 if gated else 1):
            for i in range(AHEAD):
                ahead[i] = listed[min(at + i, end - 1)] * width + start(part, width, hidden)
            multiply(bundles, ahead, rows, x, products[part], 0)
        for i in range(rows):
            exceeds, row = False, listed[at + i]
            for vector in range(len(x)):
                shift = bias[row] if len(bias) else numba.float32(0)
                value = activate(products[0, vector, i] + shift)
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
    def ffn(bundles, listed, starts, wanted, bias, x, threshold, partials, first, last):
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
