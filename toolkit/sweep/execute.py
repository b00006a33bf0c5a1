"""Run one notebook of a plan with papermill: `python -m toolkit.sweep.execute PLAN ID THREADS`.

Results are made in a scratch folder, and replace `results/<id>/` once everything is there. A notebook that fails leaves
the previous results unchanged.
"""

import contextlib
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from toolkit.errors import UserError, disk_trouble, run_command
from toolkit.evidence.page import write_page
from toolkit.extras import extra
from toolkit.files import make_folder, put_in_place, read_json, scratch_folder, write_json
from toolkit.sweep import state
from toolkit.sweep.fork_server import ForkedKernelManager
from toolkit.sweep.forked import PEAK
from toolkit.sweep.jobs import REQUIRED, STAMP, Job
from toolkit.sweep.state import State

with extra("lab"):
    import papermill
    from papermill.exceptions import PapermillExecutionError

OUTPUT_S = 60  # how long a cell's outputs may come after its end; after 4 s they would be lost on a busy machine


def main(plan: Path, id: str, threads: int) -> int:
    """Run the job on so many threads and publish its results; 0 if all went well."""
    planned = read_json(plan)
    job = Job(**planned["jobs"][id] | {"threads": threads})
    _die_with(planned.get("driver"))
    running = State(id, "running", time.time(), **state.this_process())
    running.save()
    state.failed_page(id).unlink(missing_ok=True)
    with scratch_folder(make_folder(job.folder.parent)) as scratch:
        staging = scratch / job.folder.name
        staging.mkdir()
        os.environ[PEAK] = str(scratch / "peak")
        error = _execute(job, staging) or _finish(job, staging)
        if error:
            with contextlib.suppress(Exception):  # without the executed notebook the report still tells the error
                _keep_failure(job, staging, error)
        peak = _peak_memory_bytes(scratch / "peak")
    outcome = replace(
        running,
        status="failed" if error else "done",
        error=error,
        seconds=round(time.time() - running.started, 2),
        peak_memory_bytes=peak,
    )
    outcome.save()
    if error:
        print(f"{id}: {error}", file=sys.stderr)
    return 1 if error else 0


@dataclass(frozen=True)
class _Log:
    """Writes a notebook's stderr to the sweep's log, line by line. Every update of a progress bar becomes a line."""

    id: str

    def write(self, text: str) -> None:
        for line in re.split(r"[\r\n]+", text):
            if line.strip():
                print(f"{self.id}: {line}", file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def _execute(job: Job, staging: Path) -> str | None:
    """Run the notebook. Returns the first line of its error, or None."""
    threads = str(job.threads)
    os.environ |= {
        "TOOLKIT_STAGING_DIR": str(staging),
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), threads),
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONSAFEPATH": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    return run_notebook(job.id, job.notebook, staging / "notebook.ipynb", job.about().settings(job.parameters))


def run_notebook(
    id: str, notebook: str | Path, executed: Path, parameters: Mapping[str, object] | None = None
) -> str | None:
    """Run a notebook without a front end, and write it with its outputs. The first line of its error, or None."""
    try:
        papermill.execute_notebook(
            _literal(notebook),
            _literal(executed),
            parameters=parameters,
            kernel_name="python3",
            language="python",
            cwd=str(Path(notebook).parent),
            progress_bar=False,
            stderr_file=_Log(id),
            iopub_timeout=OUTPUT_S,
            kernel_manager_class=ForkedKernelManager,
        )
    except PapermillExecutionError as error:
        return f"{error.ename}: {error.evalue}".splitlines()[0]
    except Exception as error:  # a dead kernel, a full disk: the sweep goes on and reports it
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _literal(path: str | Path) -> str:
    """A path for papermill, which fills in names in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _finish(job: Job, staging: Path) -> str | None:
    """Write the page and the stamp, and publish the results; what went wrong if that cannot be done."""
    if absent := [name for name in REQUIRED if not (staging / name).is_file()]:
        return f"the notebook ended without saving {', '.join(absent)}"
    try:
        write_page(staging / "notebook.ipynb", staging / "page.html", job.about())
        write_json(staging / STAMP, {"id": job.id, "key": job.key})
        put_in_place(staging, job.folder)
    except Exception as error:  # a page that cannot be made, a full disk: the sweep goes on and reports it
        told = error if isinstance(error, UserError) else disk_trouble(error) or f"{type(error).__name__}: {error}"
        return f"its results cannot be kept: {told}".splitlines()[0]
    return None


def _keep_failure(job: Job, staging: Path, error: str) -> None:
    executed = staging / "notebook.ipynb"
    if executed.is_file():
        kept = state.failed_page(job.id)
        make_folder(kept.parent)
        write_page(executed, executed.with_suffix(".html"), job.about(), error)
        executed.with_suffix(".html").replace(kept.with_suffix(".html"))
        executed.replace(kept)


def _peak_memory_bytes(forked: Path) -> int:
    """The largest resident size of the notebook's kernel: what a forked one left in a file, or what was waited for."""
    if forked.is_file():
        return int(forked.read_text()) * 1024
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _die_with(driver: dict | None) -> None:
    """End this process and its kernel once the driver is gone. On another host the scheduler does that."""
    if not driver or driver["host"] != state.this_process()["host"]:
        return

    def watch() -> None:
        while state.is_alive(driver["pid"], driver["process_started"]):
            time.sleep(1)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
