"""Spans as rows of 28 bytes: a long text has hundreds a token, and an object for each would take a kilobyte.

log = SpanLog()
log.append((thread, "read", "layer", "storage", 3), start_s, end_s, nbytes)
log.rows().nearest(0, 10)
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import numpy as np

from toolkit.errors import unknown
from toolkit.timeline import NEAREST, STAGES

ROW = np.dtype([("kind", "<u4"), ("start_s", "<f8"), ("end_s", "<f8"), ("nbytes", "<i8")])
PACKED_ROW = struct.Struct("<Iddq")
# what spans share: the thread that added them, and their stage, operation, tier and layer
SpanKind: TypeAlias = tuple[int, str, str, str, int | None]
OF_STAGE = 8  # numbers of kinds: the rest by it is the place of their stage in `STAGES`


class KindNumbers(dict[SpanKind, int]):
    """A number for each kind that is asked for. Raises `UserError` for an unknown stage."""

    def __init__(self) -> None:
        self._new = count()

    def __missing__(self, kind: SpanKind) -> int:
        """A new number."""
        if kind[1] not in STAGES:
            raise unknown("stage", kind[1], STAGES)
        return self.setdefault(kind, OF_STAGE * next(self._new) + STAGES.index(kind[1]))  # the first thread's stays


class SpanLog:
    """Rows in the order in which they came. Any thread may append while others do, or read."""

    def __init__(self) -> None:
        self._rows, self._numbers = bytearray(), KindNumbers()

    def append(self, kind: SpanKind, start_s: float, end_s: float, nbytes: int) -> None:
        """Add a row."""
        self._rows += PACKED_ROW.pack(self._numbers[kind], start_s, end_s, nbytes)  # whole, whatever other threads do

    def rows(self, first: int = 0) -> "SpanRows":
        """A copy of the rows from one on."""
        return SpanRows(np.frombuffer(self._rows[first * ROW.itemsize :], ROW))

    def fields(self, first: int) -> Iterator[tuple]:
        """The thread of each row from one on, then the fields of its `Span`."""
        rows = self.rows(first).table.tolist()
        kinds = {number: kind for kind, number in self._numbers.copy().items()}
        for number, start_s, end_s, nbytes in rows:
            *kind, layer = kinds[number]
            yield *kind, start_s, end_s, nbytes, layer

    def forget(self, rows: int) -> None:
        """Drop so many of the first rows."""
        del self._rows[: rows * ROW.itemsize]

    def threads(self) -> set[int]:
        """The threads that appended."""
        return {thread for thread, *_ in self._numbers.copy()}


@dataclass(frozen=True)
class SpanRows:
    """Some rows: `table` has the fields of `ROW`."""

    table: np.ndarray

    def __len__(self) -> int:
        """How many there are."""
        return len(self.table)

    def moved(self, stage: str) -> int:
        """The bytes that the spans of a stage moved."""
        return int(self.table["nbytes"][self._stages() == STAGES.index(stage)].sum())

    def nearest(
        self, start_s: float, end_s: float, compilations: Sequence[tuple[float, float]] = ()
    ) -> list[tuple[str, float, int]]:
        """Stage, seconds and bytes of what lies between two instants, as `Timeline.nearest` has them.

        `compilations` are the starts and ends of spans of the stage `compile`.
        """
        stages, starts, ends, nbytes = self._within(start_s, end_s, np.array(compilations, float).reshape(-1, 2))
        rows, covered_s, nearer = [], 0.0, np.zeros(len(stages), bool)
        for stage in (*NEAREST, "other"):
            found = stages == STAGES.index(stage)
            nearer |= found
            with_it_s = _covered_s(starts[nearer], ends[nearer]) if found.any() else covered_s
            if stage == "other":
                with_it_s = max(with_it_s, end_s - start_s)
            if found.any() or with_it_s > covered_s:
                rows.append((stage, with_it_s - covered_s, int(nbytes[found].sum())))
            covered_s = with_it_s
        return rows

    def _within(self, start_s: float, end_s: float, compiled: np.ndarray) -> tuple[np.ndarray, ...]:
        """The stages, starts, ends and bytes of the parts that lie between two instants."""
        stages = np.append(self._stages(), np.full(len(compiled), STAGES.index("compile"), np.uint8))
        starts = np.append(self.table["start_s"], compiled[:, 0])
        ends = np.append(self.table["end_s"], compiled[:, 1])
        begin, finish = np.clip(starts, start_s, end_s) - start_s, np.clip(ends, start_s, end_s) - start_s
        within = (starts < end_s) & (ends > start_s)
        shares = np.divide(finish - begin, ends - starts, out=np.ones(len(starts)), where=ends > starts)
        nbytes = np.rint(shares[: len(self)] * self.table["nbytes"])  # compilations move none
        return stages[within], begin[within], finish[within], np.append(nbytes, np.zeros(len(compiled)))[within]

    def _stages(self) -> np.ndarray:
        """The place of each row's stage in `STAGES`."""
        return (self.table["kind"] % OF_STAGE).astype(np.uint8)


def _covered_s(starts: np.ndarray, ends: np.ndarray) -> float:
    """Length of the union of intervals."""
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    before = np.append(0.0, reached[:-1])[: len(starts)]
    return float(np.maximum(0.0, reached - np.maximum(starts, before)).sum())
