"""The seconds of a task by its bytes, as measured at several sizes, without a formula.

    curve = Curve.through(nbytes=[1e6, 1e7, 1e8], seconds=[0.0004, 0.0021, 0.0100])
    curve.at(5e7)    # 0.0056: on the straight line between its neighbours

A fixed time and a rate do not describe a task whose rate depends on its size. A compiled product is one: its second
thread often starts on the first one's core and is moved to a free core only milliseconds later, so a small product
runs at the rate of one thread and a large one at the rate of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.errors import UserError


@dataclass(frozen=True)
class Curve:
    """Seconds at some sizes in bytes, smallest size first. Seconds never fall from one size to the next."""

    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, nbytes: Sequence[float], seconds: Sequence[float]) -> "Curve":
        """The curve through measured points, in any order.

        A size never takes longer than a larger one does, so a time above that of a larger size is a slow spell: it is
        cut to the larger size's. Raises `UserError` unless there is one time for each size, and all are above zero.
        """
        size, time = np.asarray(nbytes, float), np.asarray(seconds, float)
        if not len(size) or len(size) != len(time) or min(size.min(), time.min()) <= 0 or len(set(size)) < len(size):
            raise UserError(f"{len(size)} sizes and {len(time)} times: expected a time for each size, all above zero")
        order = np.argsort(size)
        never_above_larger = np.minimum.accumulate(time[order][::-1])[::-1]
        return cls(tuple(size[order].tolist()), tuple(never_above_larger.tolist()))

    def at(self, nbytes: float) -> float:
        """Seconds for so many bytes, on the straight line between the two sizes beside them.

        Below the smallest size it takes as long as the smallest; beyond the largest it goes on at the largest's rate.
        """
        beyond = max(1.0, nbytes / self.nbytes[-1])
        return beyond * float(np.interp(nbytes, self.nbytes, self.seconds))
