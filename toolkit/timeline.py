"""Spans on a timeline, recorded by the clock or predicted by the cost model.

    recorder = Recorder()
    with recorder.span("read", "fc1", tier="storage", layer=13, nbytes=382_205_952):
        ...
    recorder.timeline().breakdown()    # where the time went: each instant counts once
    recorder.timeline().stages()       # how long each stage was busy, and its GB/s: stages overlap

A measured timeline and a modelled one are of the same type, so the same tables and figures are made from both.

A kernel is compiled within the span that first calls it. `compiled_since` notes that, and a recorder cuts it out of the
span, as a span of the stage `compile`: it happens once on a machine, and is no work of the model.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from toolkit.errors import UserError, unknown

if TYPE_CHECKING:
    import pandas as pd

# storage → memory, DRAM → device, packed → dense, products, the rest, neurons moved within DRAM, machine code made
STAGES = ("read", "copy", "decode", "compute", "other", "manage", "compile")
NEAREST = ("compile", "compute", "decode", "copy", "manage", "read")  # to the result, which waits for all of them
EVIDENCE = ("measured", "modelled")
TRANSFERS = ("read", "copy")
GB = 1e9


@dataclass(frozen=True)
class Span:
    """One stage of one operation, from a start to an end.

    `tier` names the memory that the stage takes its bytes from: storage for a read, DRAM for a copy, the memory that it
    works in for a decode or a product. `nbytes` are the bytes that it moves: stored bytes for a read or copy, dense
    bytes for a decode, bytes of the weight for a product. Seconds count from the timeline's start.
    Raises `UserError` for an unknown stage, a span that ends before it starts, or a negative number.
    """

    stage: str
    op: str
    tier: str
    start_s: float
    end_s: float
    nbytes: int = 0
    layer: int | None = None

    def __post_init__(self):
        """Refuse impossible values."""
        if self.stage not in STAGES:
            raise unknown("stage", self.stage, STAGES)
        if not 0 <= self.start_s <= self.end_s < float("inf") or self.nbytes < 0:
            raise UserError(f"{self}: expected 0 <= start_s <= end_s and nbytes >= 0")

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end_s - self.start_s

    def within(self, start_s: float, end_s: float) -> "Span":
        """The part of the span between two instants, with times counted from the first and bytes in proportion."""
        begin_s, finish_s = max(self.start_s, start_s), min(self.end_s, end_s)
        share = (finish_s - begin_s) / self.seconds if self.seconds else 1.0
        return replace(self, start_s=begin_s - start_s, end_s=finish_s - start_s, nbytes=round(share * self.nbytes))


@dataclass(frozen=True, repr=False)
class Timeline:
    """Spans, and their evidence: "measured" by the clock or "modelled" by a cost model.

    `breakdown` says where the time went, `stages` how long each stage was busy and how many GB a second it moved, and
    `table` has each span. Seconds count from the first span's recorder. Raises `UserError` for any other evidence.
    """

    spans: tuple[Span, ...]
    evidence: str

    def __post_init__(self):
        """Refuse an unknown evidence."""
        if self.evidence not in EVIDENCE:
            raise unknown("evidence of a timeline", self.evidence, EVIDENCE)

    def __repr__(self) -> str:
        """Its evidence, and the seconds of each stage of `breakdown`."""
        parts = ", ".join(f"{stage} {seconds:.3g} s" for stage, seconds, _ in self.nearest())
        return (
            f"<Timeline, {self.evidence}: {len(self.spans)} spans in {self.total_s:.3g} s{': ' * bool(parts)}{parts}>"
        )

    def _repr_html_(self) -> str:
        return self.breakdown().round({"seconds": 3, "share_percent": 1}).to_html(index=False, border=0)

    @property
    def total_s(self) -> float:
        """From the first span's start to the last one's end."""
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans) if self.spans else 0.0

    def busy_s(self, *stages: str) -> float:
        """Seconds in which at least one span of these stages (any stage, if none is named) was under way."""
        return union_s((s.start_s, s.end_s) for s in self.spans if not stages or s.stage in stages)

    def window(self, start_s: float, end_s: float) -> "Timeline":
        """The timeline between two instants, with times counted from the first. Time without a span is stage `other`.

        A span that reaches beyond is cut, and its bytes are reduced in proportion. Raises `UserError` for an end before
        the start.
        """
        if not start_s <= end_s:
            raise UserError(f"a window from {start_s} to {end_s} s: expected an end that is not before the start")
        kept = [s.within(start_s, end_s) for s in self.spans if s.start_s < end_s and s.end_s > start_s]
        idle = gaps(((s.start_s, s.end_s) for s in kept), end_s - start_s)
        return Timeline((*kept, *(Span("other", "pass", "dram", *gap) for gap in idle)), self.evidence)

    def table(self) -> "pd.DataFrame":
        """A row a span, by start: stage, op, tier, start_s, end_s, nbytes, layer, seconds, evidence."""
        rows = [asdict(s) | {"seconds": s.seconds} for s in sorted(self.spans, key=lambda s: s.start_s)]
        columns = [*Span.__dataclass_fields__, "seconds"]
        return _frame(rows, columns=columns).astype({"layer": "Int64"}).assign(evidence=self.evidence)

    def stages(self) -> "pd.DataFrame":
        """A row a stage that occurs, then `transfer` (read or copy) and `total`. `breakdown` has shares that add up.

        Columns: stage, seconds (busy, so overlapping spans of a stage count once; of `total` from first start to last
        end), share_percent of the total (100 at most; stages overlap, so theirs add up to more), nbytes (of `transfer`
        and `total` what was read and copied), gb_s, evidence.
        """
        occurring = [stage for stage in STAGES if any(s.stage == stage for s in self.spans)]
        rows = [(stage, self.busy_s(stage), self._nbytes(stage)) for stage in occurring]
        moved = self._nbytes(*TRANSFERS)
        rows += [("transfer", self.busy_s(*TRANSFERS), moved), ("total", self.total_s, moved)]
        table = _frame(rows, columns=["stage", "seconds", "nbytes"])
        share = 100 * table["seconds"] / self.total_s if self.total_s else 0.0
        return table.assign(
            share_percent=share, gb_s=(table["nbytes"] / GB / table["seconds"]).fillna(0), evidence=self.evidence
        )

    def breakdown(self) -> "pd.DataFrame":
        """Where the time went, each instant counted once: a row a stage that occurs.

        Where stages overlap, the instant belongs to the one nearest to the result: `compile`, then `compute`, `decode`,
        `copy`, `manage`, `read`. So the seconds of `read` are those that only the disk was waited for. Columns: stage,
        seconds, share_percent of their sum, nbytes (as in `stages`), evidence.
        """
        table = _frame(self.nearest(), columns=["stage", "seconds", "nbytes"])
        share = 100 * table["seconds"] / (table["seconds"].sum() or 1.0)
        return table.assign(share_percent=share, evidence=self.evidence)

    def nearest(self) -> list[tuple[str, float, int]]:
        """The stages, seconds and bytes of `breakdown`, without pandas."""
        rows, covered = [], []
        for stage in (*NEAREST, "other"):
            spans = [s for s in self.spans if s.stage == stage]
            if spans:
                before = union_s(covered)
                covered += [(s.start_s, s.end_s) for s in spans]
                rows.append((stage, union_s(covered) - before, self._nbytes(stage)))
        return rows

    def _nbytes(self, *stages: str) -> int:
        return sum(s.nbytes for s in self.spans if s.stage in stages)


class Recorder:
    """Records spans from any number of threads on one monotonic clock, whose zero is the recorder's making."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        from toolkit.span_log import SpanLog  # and NumPy, which `toolkit.Timeline` alone does not need

        self._clock, self._zero = clock, clock()
        self._log, self._made = SpanLog(), list[tuple[int, Span]]()  # of the first rows: thread and span
        self._lock = threading.Lock()

    @contextmanager
    def span(self, stage: str, op: str, tier: str, nbytes: int = 0, layer: int | None = None) -> Iterator[None]:
        """Time the body. A body that raises leaves no span; a wrong name raises before the body runs.

        On a CUDA device the body must wait for what it launched: the clock is the host's.
        """
        start_s = self.now_s()
        begun = Span(stage, op, tier, start_s, start_s, nbytes, layer)
        yield
        self.add(replace(begun, end_s=self.now_s()))

    def add(self, span: Span) -> None:
        """Add a span that was timed elsewhere, for example by CUDA events, in seconds since this recorder's zero."""
        kind = threading.get_ident(), span.stage, span.op, span.tier, span.layer
        self._log.append(kind, span.start_s, span.end_s, span.nbytes)

    def record(self, stage: str, op: str, tier: str, start_s: float, nbytes: int, layer: int | None) -> None:
        """Add a span that ends now. Times and bytes are checked when the timeline is asked for, so this is quick."""
        self._log.append((threading.get_ident(), stage, op, tier, layer), start_s, self.now_s(), nbytes)

    def now_s(self) -> float:
        """Seconds since this recorder's zero."""
        return self._clock() - self._zero

    def take_bytes(self, stage: str) -> int:
        """The bytes that the spans of a stage moved so far. All spans are forgotten, so that the next call counts anew.

        A text of any length takes no memory for its spans then.
        """
        with self._lock:
            taken = self._log.rows()
            self._log.forget(len(taken))  # another thread may be adding one
            self._made.clear()
        return taken.moved(stage)

    def moved(self, stage: str) -> int:
        """The bytes that the spans of a stage moved so far. The spans stay."""
        return self._log.rows().moved(stage)

    def timeline(self) -> Timeline:
        """The spans that have ended so far, as a measured timeline: an object for each."""
        with self._lock:
            self._made += [(thread, Span(*fields)) for thread, *fields in self._log.fields(len(self._made))]
            return Timeline(tuple(self._apart_from_compilations()), "measured")

    def nearest(self, start_s: float, end_s: float) -> list[tuple[str, float, int]]:
        """`timeline().window(start_s, end_s).nearest()` without an object for each span, for a text of any length."""
        compilations = [ends for thread in self._threads() for ends in self._compilations(thread)]
        return self._log.rows().nearest(start_s, end_s, compilations)

    def _threads(self) -> set[int]:
        """The threads that added spans, if they go by the clock that compilations are timed with."""
        return self._log.threads() if self._clock is time.perf_counter else set()

    def _apart_from_compilations(self) -> Iterator[Span]:
        """The spans without the compilations of their own thread, and those as spans."""
        compiled = {thread: self._compilations(thread) for thread in self._threads()}
        for thread, span in self._made:
            within = [ends for ends in compiled.get(thread, ()) if ends[0] < span.end_s and ends[1] > span.start_s]
            if not within:
                yield span
                continue
            left = gaps([(start - span.start_s, end - span.start_s) for start, end in within], span.seconds)
            parts = [replace(span, start_s=span.start_s + start, end_s=span.start_s + end) for start, end in left]
            first, *others = parts or [replace(span, end_s=span.start_s)]
            yield from (first, *(replace(part, nbytes=0) for part in others))  # the bytes count once
        for start_s, end_s in sorted(chain(*compiled.values())):
            yield Span("compile", "kernels", "dram", start_s, end_s)

    def _compilations(self, thread: int) -> list[tuple[float, float]]:
        """A thread's compilations since this recorder's zero: one that compiles others holds theirs."""
        found: list[tuple[float, float]] = []
        for start, end in sorted(
            (start - self._zero, end - self._zero) for of, start, end in _compiled if of == thread
        ):
            if start >= 0 and (not found or start >= found[-1][1]):
                found.append((start, end))
        return found


_compiled: list[tuple[int, float, float]] = []  # of this process: thread, start and end by `time.perf_counter`


def compiled_since(start: float) -> None:
    """Note that this thread has compiled kernels since `start`, an instant of `time.perf_counter`."""
    _compiled.append((threading.get_ident(), start, time.perf_counter()))


class ReportedTime(Recorder):
    """A recorder of work that reports its own seconds, such as another process. Its clock stands still in between."""

    def __init__(self):
        self._spent_s = 0.0
        super().__init__(lambda: self._spent_s)

    def report(self, stage: str, op: str, tier: str, seconds: float, nbytes: int = 0) -> None:
        """Add a span of so many seconds, by which the clock advances."""
        begun_s, self._spent_s = self._spent_s, self._spent_s + seconds
        self.record(stage, op, tier, begun_s, nbytes, None)


def _frame(rows: Iterable, columns: list[str]) -> "pd.DataFrame":
    import pandas as pd  # a recorder starts without it: it takes a good part of the time to the first token

    return pd.DataFrame(rows, columns=columns)


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    covered = reached = 0.0
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def gaps(intervals: Iterable[tuple[float, float]], until: float) -> Iterator[tuple[float, float]]:
    """The time that no interval (start, end) covers between 0 and `until`."""
    reached = 0.0
    for start, end in [*sorted(intervals), (until, until)]:
        if start > reached:
            yield reached, start
        reached = max(reached, end)
