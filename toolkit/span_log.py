"""Spans as rows of 28 bytes: a long text has hundreds a token, and an object for each would take a kilobyte.

log = SpanLog()
log.append(SpanKind(thread, "read", "layer", "storage", 3), start_s, end_s, nbytes)
log.rows()["end_s"]
"""

import struct
from collections import defaultdict
from itertools import count
from typing import NamedTuple

import numpy as np

ROW = np.dtype([("kind", "<u4"), ("start_s", "<f8"), ("end_s", "<f8"), ("nbytes", "<i8")])
PACKED_ROW = struct.Struct("<Iddq")


class SpanKind(NamedTuple):
    """The thread that added some spans, and all their fields but times and bytes."""

    thread: int
    stage: str
    op: str
    tier: str
    layer: int | None


class SpanLog:
    """Rows in the order in which they came. Any thread may append while others do, or read."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._numbers: defaultdict[SpanKind, int] = defaultdict(count().__next__)

    def append(self, kind: SpanKind, start_s: float, end_s: float, nbytes: int) -> None:
        """Add a row."""
        self._rows += PACKED_ROW.pack(self._numbers[kind], start_s, end_s, nbytes)  # whole, whatever other threads do

    def rows(self, first: int = 0) -> np.ndarray:
        """A copy of the rows from one on: fields kind (a number of `kinds`), start_s, end_s and nbytes."""
        return np.frombuffer(self._rows[first * ROW.itemsize :], ROW)

    def kinds(self) -> dict[int, SpanKind]:
        """The kinds by their numbers, which begin at 0."""
        return {number: kind for kind, number in self._numbers.copy().items()}

    def forget(self, rows: int) -> None:
        """Drop so many of the first rows."""
        del self._rows[: rows * ROW.itemsize]
