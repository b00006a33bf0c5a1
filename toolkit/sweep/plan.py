"""What a sweep does: each notebook's parameters, and whether its results are still valid for them."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit import paths, sources
from toolkit.errors import UserError, unknown
from toolkit.evidence.catalogue import PRESETS, Notebook, select
from toolkit.files import file_sha256, make_folder, read_json, write_json

STAMP = "done.json"


@dataclass(frozen=True)
class Job:
    """One notebook to run: `key` digests all that its results depend on."""

    id: str
    title: str
    notebook: str
    parameters: dict[str, object]
    key: str
    threads: int
    alone: bool

    @property
    def folder(self) -> Path:
        """Where its results go."""
        return paths.results_dir() / self.id

    def is_fresh(self) -> bool:
        """Whether the results there were made by this very job and are as they were left, by size and checksum."""
        stamp = read_json(self.folder / STAMP)
        sizes, sums = stamp.get("files"), stamp.get("sha256")
        if stamp.get("key") != self.key or not isinstance(sizes, dict) or not isinstance(sums, dict):
            return False
        files = {name: self.folder / name for name in sizes}
        return all(file.is_file() and file.stat().st_size == sizes[name] for name, file in files.items()) and all(
            file_sha256(file) == sums.get(name) for name, file in files.items()
        )


def make_jobs(
    only: list[str], preset: str = "standard", settings: dict[str, object] | None = None, parallel: int = 1
) -> list[Job]:
    """The jobs for the chosen notebooks.

    `settings` overrides parameters wherever a notebook has them. Raises `UserError` for an unknown notebook, preset
    or parameter, and for a value of another type than the parameter's default.
    """
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    chosen = select(only)
    settings = settings or {}
    known = {name: value for notebook in chosen for name, value in notebook.parameters.items()}
    for name, value in settings.items():
        if name not in known:
            raise unknown("parameter", name, known)
        _check_type(name, value, known[name])
    return [_job(notebook, preset, settings, parallel) for notebook in chosen]


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def write_plan(jobs: list[Job], file: Path, **extra: object) -> None:
    """Hand the jobs over to the Snakefile and to `execute`."""
    make_folder(file.parent)
    write_json(file, {"jobs": {job.id: asdict(job) for job in jobs}, "results": str(paths.results_dir()), **extra})


def read_job(file: Path, id: str) -> Job:
    """One job of a plan that `write_plan` wrote."""
    return Job(**json.loads(file.read_text(encoding="utf-8"))["jobs"][id])


def _job(notebook: Notebook, preset: str, settings: dict[str, object], parallel: int) -> Job:
    chosen = {name: value for name, value in settings.items() if name in notebook.parameters}
    parameters = notebook.preset(preset) | chosen
    threads = cores() if notebook.alone else max(1, cores() // parallel)
    key = sources.digest(notebook.code, json.dumps(parameters, sort_keys=True))
    return Job(notebook.id, notebook.title, str(notebook.path), parameters, key, threads, notebook.alone)


def _check_type(name: str, value: object, default: object) -> None:
    accepted = (int, float) if isinstance(default, float) else type(default)
    wrong = not isinstance(value, accepted) or isinstance(value, bool) != isinstance(default, bool)
    if default is not None and value is not None and wrong:
        raise UserError(
            f"parameter {name} = {json.dumps(value)}: expected {type(default).__name__}, such as {json.dumps(default)}"
        )
