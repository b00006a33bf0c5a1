"""What a sweep does: each notebook's parameters, and whether its results are still valid for them."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit import paths, sources
from toolkit.errors import unknown
from toolkit.evidence.catalogue import PRESETS, Notebook, select
from toolkit.evidence.schema import check_parameters
from toolkit.files import file_sha256, make_folder, read_json, write_json

STAMP = "done.json"
REQUIRED = ("table.csv", "meta.json")  # what a notebook must save


@dataclass(frozen=True)
class Job:
    """One notebook to run: `key` digests all that its results depend on."""

    id: str
    title: str
    notebook: str
    parameters: dict[str, Any]
    key: str
    threads: int
    alone: bool

    @property
    def folder(self) -> Path:
        """Where its results go."""
        return paths.results_dir() / self.id

    def is_fresh(self) -> bool:
        """Whether the results there were made by this very job and are as they were left, by their checksums."""
        stamp = read_json(self.folder / STAMP)
        sums = stamp.get("sha256")
        if stamp.get("key") != self.key or not isinstance(sums, dict) or not sums.keys() >= set(REQUIRED):
            return False
        files = {self.folder / name: digest for name, digest in sums.items()}
        try:
            return all(file.is_file() and file_sha256(file) == digest for file, digest in files.items())
        except (OSError, ValueError):  # it cannot be read, or has no name that a file can have
            return False


def make_jobs(
    only: list[str], preset: str = "standard", settings: dict[str, object] | None = None, parallel: int = 1
) -> list[Job]:
    """The jobs for the chosen notebooks.

    `settings` overrides parameters wherever a notebook has them. Raises `UserError` for an unknown notebook, preset
    or parameter, and for a value that a notebook's parameter may not take.
    """
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    chosen = select(only)
    settings = settings or {}
    known = {name for notebook in chosen for name in notebook.parameters}
    if stray := [name for name in settings if name not in known]:
        raise unknown("parameter", stray[0], known)
    return [_job(notebook, preset, settings, parallel) for notebook in chosen]


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def write_plan(jobs: list[Job], file: Path, **extra: object) -> None:
    """Hand the jobs over to the Snakefile and to `execute`."""
    make_folder(file.parent)
    write_json(file, {"jobs": {job.id: asdict(job) for job in jobs}, **extra})


def read_job(file: Path, id: str) -> Job:
    """One job of a plan that `write_plan` wrote."""
    return Job(**json.loads(file.read_text(encoding="utf-8"))["jobs"][id])


def _job(notebook: Notebook, preset: str, settings: dict[str, object], parallel: int) -> Job:
    chosen = {name: value for name, value in settings.items() if name in notebook.parameters}
    parameters = notebook.preset(preset) | chosen
    check_parameters(notebook.id, parameters, notebook.parameters)
    threads = cores() if notebook.alone else max(1, cores() // parallel)
    key = sources.digest(notebook.code, json.dumps(parameters, sort_keys=True))
    return Job(notebook.id, notebook.title, str(notebook.path), parameters, key, threads, notebook.alone)
