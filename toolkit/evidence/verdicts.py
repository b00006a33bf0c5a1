"""The verdict on a number of ours beside a published one: three rules, the first that holds.

1. `within tolerance`: ours is within the claim's tolerance of the published value. A limit (`at_least`, `at_most`) is
   kept by any number on the side that it leaves open, and has no slack on the other. Never for a stand-in, which is
   another quantity.
2. `same effect`: ours lies on the same side of what the claim is beside as the published value does, its effect is 0.67
   to 1.5 times the published one, and it is outside the run-to-run spread: the two ranges do not meet.
3. `direction only`: ours lies on the same side; or a stand-in keeps the limit.

A number that none of them takes `differs`. So does one beyond an upper end (`up_to`) by more than the tolerance, and
one that is not above what guessing gives.

The effect of a number is how many times what it is beside it is, less one: a speed-up of 1.67 has an effect of 0.67.
If a number is below the one beside it, the inverse ratio counts, with a negative sign: a time over dense of 0.5 and a
speed-up of 2 are the same effect with opposite signs, so a time and the speed-up made from it get the same verdict.
"""

import math
from typing import NamedTuple

WITHIN = "within tolerance"
SAME_EFFECT = "same effect"
DIRECTION = "direction only"
DIFFERS = "differs"
NOT_RUN = "not run"
VERDICTS = {  # from best to worst
    WITHIN: "ours is within 10 % of the published value, or within the tolerance that the claim states",
    SAME_EFFECT: "another value, but 0.67 to 1.5 times the published effect, and outside the spread of runs",
    DIRECTION: "faster or slower, larger or smaller, as published, by another amount",
    DIFFERS: "ours was run and shows none of these, or no more than chance gives",
    NOT_RUN: "no result here answers to the claim",
}
EFFECT = (0.67, 1.5)  # the shares of the published effect between which ours is the same


class Spread(NamedTuple):
    """A number, and the range of its repetitions."""

    value: float
    low: float
    high: float


class Baseline(NamedTuple):
    """The number that one is compared with: here, and as the paper has it."""

    ours: Spread
    published: float


def verdict(
    ours: Spread,
    published: float,
    slack: float,
    beside: Baseline | None,
    bound: str | None = None,
    stand_in: bool = False,
    chance: bool = False,
) -> str:
    """One of `VERDICTS`. `slack` is absolute; `chance`: ours is no more than guessing gives."""
    if bound in ("at_least", "at_most"):
        if keeps(ours.value, published, bound):
            return DIRECTION if stand_in else WITHIN
    elif not stand_in and abs(ours.value - published) <= slack:
        return WITHIN
    if chance or beside is None or not min(ours.value, beside.ours.value) > 0:
        return DIFFERS
    beyond = (ours.value - published) * math.copysign(1, published - beside.published)
    if bound == "up_to" and beyond > slack:
        return DIFFERS
    here, there = _effect(ours.value / beside.ours.value), _effect(published / beside.published)
    if here * there <= 0:
        return DIFFERS
    apart = ours.low > beside.ours.high or ours.high < beside.ours.low
    return SAME_EFFECT if apart and EFFECT[0] <= here / there <= EFFECT[1] else DIRECTION


def keeps(ours: float, limit: float, bound: str) -> bool:
    """Whether a number is on the side that a limit leaves open."""
    return ours >= limit if bound == "at_least" else ours <= limit


def _effect(ratio: float) -> float:
    """How many times as much, less one; negative, and of the inverse ratio, where it is less."""
    return ratio - 1 if ratio >= 1 else 1 - 1 / ratio
