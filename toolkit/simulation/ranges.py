"""A prediction over the ranges in a profile: its least and most seconds, and the least and most speed-up.

A profile gives some numbers with a low and a high end. The cost model runs once at every corner: each of those numbers
at one of its two ends. The least and the most over the corners are the range of a prediction. A ratio takes both of
its times from the same corner, since one machine has one number: a rate of decoding that is low is low for all.

Why the corners are enough. Every step takes a fixed time and its bytes over a rate, so its seconds rise or fall with
each number, never both. A timeline starts a step at the latest end of what it waits for. Both a sum and a maximum rise
with each of their parts, so the total of a pass, sequential or pipelined, is least and most at corners. One after the
other, a total is linear in each fixed time and in each inverse rate; the ratio of two such totals rises or falls with
each of them, so it is least and most at corners, too. Not shown, and only as good as the corners: ratios of pipelined
totals, and a pipelined pass's `transfer`, in which reads and copies overlap.

A range is an outer bound for numbers that are anywhere within their ranges, together. It is no confidence interval: no
number's range says how likely its ends are, and numbers without a range count as exact.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import product

import numpy as np
import pandas as pd

from toolkit.machines.machine import Profile
from toolkit.policies.ways import Way
from toolkit.simulation.cost_model import PlacedLayer, predict
from toolkit.timeline.spans import Timeline

RANGED = {  # a column, and those of its range
    "seconds": ("seconds_low", "seconds_high"),
    "speedup": ("speedup_low", "speedup_high"),
    "time_over_dense": ("time_over_dense_low", "time_over_dense_high"),
}


def numbers_that_matter(machine: Profile, layers: Callable[[Profile], Iterable[PlacedLayer]], way: Way) -> list[str]:
    """The names of the numbers with a range that the times of a machine's layers depend on, each layer by itself."""

    def alone(other: Profile) -> list[Timeline]:
        return [predict(other, [layer], way) for layer in dict.fromkeys(layers(other))]

    expected = alone(machine)
    return [
        name
        for name, ends in machine.ranges().items()
        if any(alone(machine.with_values({name: end})) != expected for end in ends)
    ]


def corners(machine: Profile, names: Iterable[str]) -> list[dict[str, float]]:
    """Every way to put each of these numbers at one of its ends: 2 to the power of their count."""
    ranges = machine.ranges()
    names = list(names)
    return [dict(zip(names, ends, strict=True)) for ends in product(*(ranges[name] for name in names))]


def with_ranges(
    table: pd.DataFrame, seconds_at: Callable[[Mapping[str, float]], np.ndarray], places: Iterable[Mapping[str, float]]
) -> pd.DataFrame:
    """The table with the columns of `RANGED` more: the least and the most of each over all corners and itself.

    `table` as `beside_dense` gives it, with the column `dense_row`: the number of the row that a row is compared with,
    NaN where there is none. `seconds_at` gives the seconds of its rows, in order, at a corner. A range is NaN where no
    number with a range matters.
    """
    compared = table["dense_row"].notna().to_numpy()
    dense_row = table["dense_row"].fillna(0).astype(int).to_numpy()
    seconds = np.stack([table["seconds"].to_numpy(), *(seconds_at(corner) for corner in places)])
    with np.errstate(divide="ignore", invalid="ignore"):
        over_dense = np.where(compared, seconds / seconds[:, dense_row], np.nan)
        values = {"seconds": seconds, "time_over_dense": over_dense, "speedup": 1 / over_dense}
    columns = {}
    for column, (low, high) in RANGED.items():
        least, most = values[column].min(axis=0), values[column].max(axis=0)
        columns |= {low: np.where(least < most, least, np.nan), high: np.where(least < most, most, np.nan)}
    return table.assign(**columns).drop(columns="dense_row")
