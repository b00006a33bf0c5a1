"""The time of a task as a line over its bytes, a fixed time and a rate, and how the line is found from timings.

line = fit_line(nbytes=[1e6, 1e7, 1e8], seconds=[0.0006, 0.0051, 0.0501])    # 0.1 ms, and 2 GB/s
line.seconds(3e6)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.costs.machine import GB
from toolkit.errors import UserError


@dataclass(frozen=True)
class Line:
    """`fixed_s` seconds for any task, and its bytes at `gb_s` GB a second."""

    fixed_s: float
    gb_s: float

    def seconds(self, nbytes: float) -> float:
        """Seconds for so many bytes."""
        return self.fixed_s + nbytes / GB / self.gb_s


def fit_line(nbytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least sum of relative errors, |line / seconds - 1|; its fixed time is not below zero.

    With absolute errors the noise of the largest sizes would decide the fixed time; with squared errors one slow spell
    would decide the line. The best line passes through two of the points, or through one and the origin, so all of
    those are tried. Raises `UserError` unless there is a time for each size, and all are above zero.
    """
    size, time = np.asarray(nbytes, float), np.asarray(seconds, float)
    if not len(size) or len(size) != len(time) or min(size.min(), time.min()) <= 0:
        raise UserError(f"{len(size)} sizes and {len(time)} times to fit a line to: expected as many, all above zero")
    lines: list[tuple[float, float]] = [(0.0, t / s) for s, t in zip(size, time, strict=True)]
    for first, second in zip(*np.triu_indices(len(size), 1), strict=True):
        if size[first] != size[second]:
            slope = (time[second] - time[first]) / (size[second] - size[first])
            lines.append((time[first] - slope * size[first], slope))
    fixed_s, slope = min(
        (line for line in lines if line[0] >= 0 < line[1]), key=lambda line: _off(line[0], line[1], size, time)
    )
    return Line(float(fixed_s), float(1 / slope / GB))


def _off(fixed_s: float, slope: float, size: np.ndarray, time: np.ndarray) -> float:
    return float(np.abs((fixed_s + slope * size) / time - 1).sum())
