"""The plan of a sweep: each notebook's parameters, and whether its results are still valid for them."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import paths, sources
from toolkit.errors import unknown
from toolkit.evidence.catalogue import PRESETS, Notebook, find, parameter_words, select
from toolkit.evidence.schema import check_parameters
from toolkit.files import make_folder, read_json, write_json
from toolkit.sweep import state
from toolkit.sweep.grid import ParameterGrid

STAMP = "done.json"
UNKNOWN_MB = 8000  # of memory; the largest notebook of the presets `quick` and `standard` stays below
SPARE, OTHERS_MB = 0.5, 500  # share and MB beyond the kernel's peak: other parameters, the processes around it
REQUIRED = ("table.csv", "meta.json")  # what a notebook must save


@dataclass(frozen=True)
class Job:
    """One notebook to run: `key` digests all that its results depend on.

    `id` is the notebook's; at a point of a grid, the point's name comes before it: `<point>/<row>`.
    """

    id: str
    title: str
    notebook: str
    parameters: dict[str, Any]
    key: str
    threads: int
    alone: bool
    point: str = ""

    @property
    def row(self) -> str:
        """The id of its notebook."""
        return self.id.removeprefix(f"{self.point}/")

    def about(self) -> Notebook:
        """Its notebook, under this job's own id and title. Raises `UserError` if there is none."""
        return replace(find(self.row), id=self.id, title=self.title)

    @property
    def folder(self) -> Path:
        """Where its results go."""
        return paths.results_dir() / self.id

    def is_fresh(self) -> bool:
        """Whether the results there are whole and were made by this very job."""
        made = read_json(self.folder / STAMP).get("key") == self.key
        return made and all((self.folder / name).is_file() for name in REQUIRED)


def make_jobs(
    only: list[str],
    preset: str = "standard",
    settings: dict[str, object] | None = None,
    parallel: int = 1,
    grid: ParameterGrid | None = None,
) -> list[Job]:
    """The jobs for those of the chosen notebooks that have all parameters of `settings` and `grid`, one a point.

    Raises `UserError` for an unknown notebook, preset or parameter, and for a value that a notebook's parameter may not
    take.
    """
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    settings, varied = settings or {}, grid.values if grid else {}
    chosen = ParameterGrid({name: [value] for name, value in settings.items()} | varied).choose(select(only), only)
    points = grid.points if grid else {"": {}}
    return [
        _job(notebook, preset, settings | values, parallel, point)
        for point, values in points.items()
        for notebook in chosen
    ]


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def write_plan(jobs: list[Job], file: Path, **extra: object) -> None:
    """Hand the jobs over to the Snakefile and to `execute`, with the memory in MB that a scheduler is asked for."""
    make_folder(file.parent)
    memory_mb = {job.id: _memory_mb(job) for job in jobs}
    write_json(file, {"jobs": {job.id: asdict(job) for job in jobs}, "memory_mb": memory_mb, **extra})


def _memory_mb(job: Job) -> int:
    """The memory of a job's processes: its kernel's at its last run here, and more; `UNKNOWN_MB` if unknown."""
    last = state.load(job.id)
    took = last.peak_memory_bytes if last and last.status == "done" else None
    return UNKNOWN_MB if not took else round(took / 1e6 * (1 + SPARE) + OTHERS_MB)


def _job(notebook: Notebook, preset: str, settings: dict[str, object], parallel: int, point: str = "") -> Job:
    chosen = {name: value for name, value in settings.items() if name in notebook.parameters}
    parameters = notebook.preset(preset) | chosen
    check_parameters(notebook, parameters)
    threads = cores() if notebook.alone else max(1, cores() // parallel)
    key = sources.digest(notebook.code, json.dumps(parameters, sort_keys=True))
    id = f"{point}/{notebook.id}" if point else notebook.id
    title = f"{notebook.title}: {parameter_words(chosen)}" if chosen else notebook.title
    return Job(id, title, str(notebook.path), parameters, key, threads, notebook.alone, point)
