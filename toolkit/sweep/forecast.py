"""How long a sweep takes: from what its notebooks took with the same parameters, here or on a reference machine."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import paths
from toolkit.evidence.meta import Meta, read_meta
from toolkit.sweep.plan import Job
from toolkit.sweep.state import State

START_S = 9  # of a job, beside its notebook's own clock: a kernel, imports, the page; 5 to 12 on three machines
STEADY_S = 60  # jobs that took so long together say how this machine's pace differs from what is kept
HERE = "earlier runs here"


@dataclass(frozen=True)
class Forecast:
    """What is expected of jobs of which `parallel` run at once: `seconds` by id, where something is known.

    `sources` counts the jobs by where their seconds are from.
    """

    jobs: Sequence[Job]
    parallel: int
    seconds: Mapping[str, float]
    sources: Mapping[str, int]

    def words(self) -> str:
        """How long all of them take, and how that is known."""
        if not self.seconds:
            return "how long it takes is not known: nothing is kept of these notebooks with these parameters"
        known = ", ".join(f"{count} by {source}" for source, count in self.sources.items())
        unknown = len(self.jobs) - len(self.seconds)
        guessed = f", {unknown} by the mean of these" if unknown else ""
        return f"about {duration(self.left_s({}))} ({known}{guessed}; kept results of a shared cache make it shorter)"

    def left_s(self, states: Mapping[str, State]) -> float | None:
        """Seconds until all jobs are over, by the states of those that have begun; None while nothing is known.

        Jobs that are over say by how much this machine is slower or faster than expected.
        """
        known = dict(self.seconds)
        over = {id: last.seconds for id, last in states.items() if last.status == "done" and last.seconds is not None}
        if not known and not over:
            return None
        mean_s = sum((known or over).values()) / len(known or over)
        both = [id for id in over if id in known]
        pace = (sum(over[id] for id in both) + STEADY_S) / (sum(known[id] for id in both) + STEADY_S)
        left_s = 0.0
        for job in self.jobs:
            last, expected_s = states.get(job.id), pace * known.get(job.id, mean_s)
            if last is None or last.status == "running":
                elapsed_s = time.time() - last.started if last else 0.0
                left_s += max(0.0, expected_s - elapsed_s) / (1 if job.alone else self.parallel)
        return left_s


def forecast(jobs: Sequence[Job], parallel: int) -> Forecast:
    """The forecast of these jobs. Of several reference machines the one counts whose notebooks took longest.

    That one began without a cache, as a first sweep does.
    """
    found: dict[str, tuple[Meta, str]] = {}
    folders = [folder for folder in sorted((paths.root() / "results" / "reference").glob("*")) if folder.is_dir()]
    kept = {folder.name: _kept(jobs, lambda job, folder=folder: folder / job.row) for folder in folders}
    longest = sorted(kept, key=lambda name: -sum(meta.wall_s or 0.0 for meta in kept[name].values()))
    for source, metas in [(HERE, _kept(jobs, lambda job: job.folder)), *((name, kept[name]) for name in longest)]:
        found = {id: (meta, source) for id, meta in metas.items()} | found
    seconds = {job.id: _seconds(job, found[job.id][0]) for job in jobs if job.id in found}
    names = (source if source == HERE else f"reference machine {source}" for _, source in found.values())
    return Forecast(jobs, parallel, seconds, Counter(names))


def _kept(jobs: Sequence[Job], place: Callable[[Job], Path]) -> dict[str, Meta]:
    """What the results at each job's place say of the same notebook with the same parameters."""
    metas = {job.id: (job, read_meta(place(job))) for job in jobs}
    return {id: meta for id, (job, meta) in metas.items() if meta.wall_s and meta.parameters == job.parameters}


def _seconds(job: Job, meta: Meta) -> float:
    """What a job takes here. One that shares the machine needs as many seconds of its cores as it did there."""
    threads = 1 if job.alone or not meta.threads else meta.threads / job.threads
    return ((meta.wall_s or 0.0) + START_S) * threads


def duration(seconds: float) -> str:
    """Seconds up to a minute and a half, then minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
