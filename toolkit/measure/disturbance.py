"""Whether other work disturbed a measurement: CPU time of other processes, and time that a hypervisor took away.

    guard = Guard()
    with guard.turn() as load:
        ...                     # what is timed
    guard.close()
    load.disturbed

The CPU time of others is the busy time of the cores less that of this process and its children. The kernel counts it in
ticks of 10 ms, so it is read over `WINDOW_S` at least: shorter turns that follow each other share a window, from the
start of the first to the end of the last, and so have the same load.
"""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import nan

import pandas as pd
import psutil

# On an idle machine of two cores, 19 of 20 windows of 0.2 s read less than 0.12 of a core, and windows of 0.05 s up to
# 0.6: the longer the window, the better the ticks add up. Beside buffered reads the kernel's own threads work, up to
# 0.25 of a core, so such turns may be marked on an idle machine, too. A busy process reads 0.9 to 1.1.
WINDOW_S = 0.4
LIMIT_CORES = 0.1
MARKED = 0.5  # share of a row's turns: with fewer disturbed turns, the median lies among the others

STAR = " *"  # after the name of what was disturbed


@dataclass(frozen=True)
class Counters:
    """Seconds of the clock, and of CPU time on the cores that this process may use, since some start.

    `busy_s` is all work, `own_s` that of this process and its children, `stolen_s` what the hypervisor gave to others.
    """

    clock_s: float
    busy_s: float
    own_s: float
    stolen_s: float = 0.0


def read_counters() -> Counters:
    """The counters of now, which takes some 0.1 ms. Time in interrupts is nobody's."""
    times = psutil.cpu_times(percpu=True)
    cores = [times[core] for core in os.sched_getaffinity(0) if core < len(times)]
    busy_s = sum(core.user + core.nice + core.system for core in cores)
    stolen_s = sum(getattr(core, "steal", 0.0) for core in cores)
    return Counters(time.perf_counter(), busy_s, _own_s(), stolen_s)


def _own_s() -> float:
    """CPU seconds of this process and its children, those that ended among them."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own_s = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended just now
            own_s += sum(child.cpu_times()[:4])
    return own_s


@dataclass
class Load:
    """The cores that others kept busy during a turn, and that the hypervisor took away: averages; NaN until known."""

    others_cores: float = nan
    stolen_cores: float = nan

    @property
    def cores(self) -> float:
        """Both together."""
        return self.others_cores + self.stolen_cores

    @property
    def disturbed(self) -> bool:
        """Whether it was more than `LIMIT_CORES`."""
        return self.cores > LIMIT_CORES

    def columns(self) -> dict[str, float | bool]:
        """The columns that rows of this turn get."""
        return {"others_cores": self.others_cores, "stolen_cores": self.stolen_cores, "disturbed": self.disturbed}


class Guard:
    """Gives every turn its load. `read` gives the counters."""

    def __init__(self, read: Callable[[], Counters] | None = None):
        self._read = read or read_counters
        self._start: Counters | None = None
        self._waiting: list[Load] = []

    @contextmanager
    def turn(self) -> Iterator[Load]:
        """The load of the block; its numbers are there once a window has ended, at the latest after `close`."""
        self._start = self._start or self._read()
        load = Load()
        yield load
        self._waiting.append(load)
        now = self._read()
        if now.clock_s - self._start.clock_s >= WINDOW_S:
            self._end(now)

    def close(self) -> None:
        """End the last window, and wait until it is long enough."""
        if self._start is not None:
            time.sleep(max(0.0, WINDOW_S - (self._read().clock_s - self._start.clock_s)))
            self._end(self._read())

    def _end(self, now: Counters) -> None:
        loads = load_between(self._start, now)
        for load in self._waiting:
            load.others_cores, load.stolen_cores = loads.others_cores, loads.stolen_cores
        self._start, self._waiting = None, []


def load_between(start: Counters, end: Counters) -> Load:
    """The load between two readings. A negative difference is an error of the ticks, and counts as none."""
    seconds = max(end.clock_s - start.clock_s, 1e-9)
    others_s = (end.busy_s - start.busy_s) - (end.own_s - start.own_s)
    return Load(max(0.0, others_s) / seconds, (end.stolen_s - start.stolen_s) / seconds)


def disturbed_rows(table: pd.DataFrame) -> pd.Series:
    """Whether each measured row rests on turns of which `MARKED` or more were disturbed.

    `table` may have the column `disturbed`: a row's share of disturbed turns, or whether its one turn was. Without it,
    and where it is NaN, a row is not marked.
    """
    return _shares(table).ge(MARKED)


def is_disturbed(row: pd.Series) -> bool:
    """The same for a single row."""
    share = row.get("disturbed")
    return pd.notna(share) and float(share) >= MARKED and row.get("evidence", "measured") == "measured"


def _shares(table: pd.DataFrame) -> pd.Series:
    """The share of disturbed turns of each measured row; NaN in other rows and where nothing is known."""
    shares = table.get("disturbed", pd.Series(nan, table.index)).astype(float)
    return shares.where(table["evidence"].eq("measured")) if "evidence" in table else shares


def starred(table: pd.DataFrame, column: str) -> pd.Series:
    """The names in a column, with `STAR` where any row of that name was disturbed (`disturbed_rows`)."""
    disturbed = set(table.loc[disturbed_rows(table), column])
    return table[column].map({name: f"{name}{STAR * (name in disturbed)}" for name in table[column]})


def count_disturbed(table: pd.DataFrame) -> tuple[int, int]:
    """How many rows are marked (`disturbed_rows`), and how many measured rows are known to be disturbed or not."""
    return int(disturbed_rows(table).sum()), int(_shares(table).notna().sum())


def disturbance_words(count: int, known: int) -> str:
    """Both numbers in words: "3 of 12 measured rows were disturbed by other work"."""
    return f"{count} of {known} measured rows {'was' if count == 1 else 'were'} disturbed by other work"
