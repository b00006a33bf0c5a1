"""How long a sweep takes: from what its notebooks took with the same parameters, here or on a reference machine."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import paths
from toolkit.evidence.meta import read_meta
from toolkit.sweep.jobs import Job
from toolkit.sweep.state import State

START_S = 9  # of a job, beside its notebook's own clock: a kernel, imports, the page; 5 to 12 on three machines
STEADY_S = 60  # jobs that took so long together say how this machine's pace differs from what is known


@dataclass(frozen=True)
class Forecast:
    """Expected `seconds` by id, of the jobs that ran before with the same parameters; `parallel` jobs run at once."""

    jobs: Sequence[Job]
    parallel: int
    seconds: Mapping[str, float]

    def words(self) -> str:
        """How long all jobs take, and for how many of them that is known."""
        if not self.seconds:
            return "how long it takes is not known: nothing is kept of these notebooks with these parameters"
        known = f"{len(self.seconds)} of {len(self.jobs)} ran before with these parameters"
        where = "here or on a reference machine; kept results of a shared cache make it shorter"
        return f"about {duration(self.left_s({}))} ({known}, {where})"

    def left_s(self, states: Mapping[str, State]) -> float | None:
        """Seconds until all jobs are over, by the states of those that have begun; None while nothing is known.

        Jobs that are over give the pace: by how much this machine is slower or faster than expected.
        """
        over = {id: last.seconds for id, last in states.items() if last.status == "done" and last.seconds is not None}
        known = self.seconds or over
        if not known:
            return None
        both = [id for id in over if id in known]
        pace = (sum(over[id] for id in both) + STEADY_S) / (sum(known[id] for id in both) + STEADY_S)
        mean_s, left_s = sum(known.values()) / len(known), 0.0
        for job in self.jobs:
            last = states.get(job.id)
            if last is None or last.status == "running":
                elapsed_s = time.time() - last.started if last else 0.0
                expected_s = pace * known.get(job.id, mean_s)
                left_s += max(0.0, expected_s - elapsed_s) / (1 if job.alone else self.parallel)
        return left_s


def forecast(jobs: Sequence[Job], parallel: int) -> Forecast:
    """The forecast of these jobs. One reference machine counts: the one that took longest, which had an empty cache."""
    longest = max(
        (_seconds(jobs, machine) for machine in _references()), key=lambda kept: sum(kept.values()), default={}
    )
    return Forecast(jobs, parallel, longest | _seconds(jobs))


def longest_seconds(jobs: Sequence[Job]) -> dict[str, float]:
    """By id, what a job's notebook took at most, here or on a reference machine, whatever its parameters; 0 if unknown.

    It orders jobs, where `forecast` would often know nothing: a notebook that takes long in one preset does in another.
    """
    places = [paths.results_dir(), *_references()]
    return {job.id: max(read_meta(place / job.row).wall_s or 0.0 for place in places) for job in jobs}


def _references() -> list[Path]:
    return [*(paths.root() / "results" / "reference").glob("*/")]


def _seconds(jobs: Sequence[Job], machine: Path | None = None) -> dict[str, float]:
    """The times of the jobs with the same parameters, here or in a reference machine's folder.

    For a job that shares the machine, seconds times cores are taken as constant.
    """
    metas = [(job, read_meta(machine / job.row if machine else job.folder)) for job in jobs]
    return {
        job.id: (meta.wall_s + START_S) * (1 if job.alone or not meta.threads else meta.threads / job.threads)
        for job, meta in metas
        if meta.wall_s and meta.parameters == job.parameters
    }


def duration(seconds: float) -> str:
    """Seconds up to a minute and a half, then minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
