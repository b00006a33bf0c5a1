"""Start Snakemake on the stale jobs, print their progress, and end with a table and the report."""

import contextlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from toolkit import source_facts
from toolkit.errors import UserError
from toolkit.evidence import report
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.meta import read_meta
from toolkit.evidence.report import Outcome, Variant
from toolkit.evidence.verdicts import DIFFERS
from toolkit.files import locked, make_folder
from toolkit.sweep import state
from toolkit.sweep.explorers import draw_explorers
from toolkit.sweep.forecast import Forecast, duration, forecast, longest_seconds
from toolkit.sweep.fork_server import die_with_parent, fork_server, module_command
from toolkit.sweep.jobs import Job, cores, write_plan
from toolkit.sweep.profiles import cancel_jobs, more_arguments

SNAKEFILE = Path(__file__).with_name("Snakefile")
ENDED = "ended"  # the folder of Snakemake's marks, one a job that ended well in this sweep
FORKED = 4  # so many kernels are worth a fork server
STOPPING_S = 10  # for an interrupted job to stop by itself
WIDTH, INDENT = 110, " " * 10  # of the lines of an answer in the terminal
QUIET_S = 60  # without a line; then one says what is running
FIRST = "quickstart"  # its result comes within two minutes
Write = Callable[..., Path]  # (jobs, rebuild=False, running=False): writes a report on the jobs, and returns its index
REPORT_S, REPORT_PAUSE_S = 1, 120  # a report that takes longer than the one is next written after the other


def write_report(
    jobs: list[Job], rebuild: bool = False, running: bool = False, *, variant: Variant | None = None
) -> Path:
    """Write the report on every notebook, or on those that a variant changes; return its index."""
    return report.write_report(outcomes(jobs), rebuild, running, variant)


def run(jobs: list[Job], parallel: int, profile: Path | None, write: Write = write_report) -> int:
    """Run the stale jobs, then report on all by `write`. The exit status is 1 if any job has failed.

    Raises `UserError` if another sweep is writing to the same results.
    """
    with locked(make_folder(state.folder()) / "lock", wait=False) as alone:
        if not alone:
            raise UserError(f"another sweep is writing to {state.folder().parent}; wait for it or stop it")
        state.remove_unfinished()
        stale = [job for job in jobs if not job.is_fresh()]
        expected = forecast(stale, parallel)
        takes = f": {expected.words()}" if stale else ""
        _say(f"{len(jobs) - len(stale)} of {len(jobs)} notebooks up to date, {len(stale)} to run{takes}")
        started = time.time()
        with contextlib.nullcontext() if profile or len(stale) < FORKED else fork_server():
            try:
                failed = _sweep(stale, _GrowingReport(jobs, write), expected, profile) if stale else 0
            finally:
                state.remove_scratch()  # of jobs that were killed, also by an interruption
            print(summary(jobs, started), flush=True)
            if {job.id for job in jobs} >= notebooks().keys():
                draw_explorers()
        print(f"\nreport: {write(jobs)}")
        if failed and not any(last and last.status == "failed" for last in (state.load(job.id) for job in stale)):
            raise UserError(f"Snakemake stopped with status {failed}; its log: {state.folder() / 'snakemake.log'}")
        return 1 if failed or any(not job.is_fresh() for job in jobs) else 0


def outcomes(jobs: list[Job]) -> dict[str, Outcome]:
    """How the last run of every notebook ended; those without a job count as fresh."""
    fresh = {job.id: job.is_fresh() for job in jobs}
    return {id: outcome(id, fresh.get(id)) for id in notebooks()}


def outcome(id: str, fresh: bool | None) -> Outcome:
    """How the last run of a job ended; `fresh` says whether the results answer to it; None if no job is about it.

    A failed run with other parameters does not count where the results are fresh.
    """
    last = state.load(id)
    if last is None or (fresh and last.status == "failed"):
        return Outcome(fresh is not False)
    failed = state.failed_page(id) if last.status == "failed" else None
    return Outcome(fresh is not False, last.error, last.seconds, failed)


def summary(jobs: list[Job], started: float = 0.0) -> str:
    """A table of notebook, status, seconds, peak memory, the verdicts on predictions, and what of any kind differs."""
    rows = [("notebook", "status", "seconds", "peak memory", "predictions", "differs")]
    for job in jobs:
        last = state.load(job.id)
        words = status(job, last, started)
        seconds = f"{last.seconds:.0f}" if last and last.seconds is not None else "–"
        memory = f"{last.peak_memory_bytes / 2**30:.1f} GiB" if last and last.peak_memory_bytes else "–"
        by_kind = read_meta(job.folder).verdicts
        predictions = ", ".join(f"{count} {verdict}" for verdict, count in by_kind.get("prediction", {}).items())
        differing = sum(counts.get(DIFFERS, 0) for counts in by_kind.values())
        rows.append((job.id, words, seconds, memory, predictions or "–", str(differing or "–")))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def status(job: Job, last: state.State | None, started: float = 0.0) -> str:
    """The fate of a job since the time `started`, in words."""
    if job.is_fresh():
        return "done" if last and last.started >= started else "up to date"
    return f"failed: {last.error}" if last and last.status == "failed" and last.started >= started else "not run"


def _sweep(stale: list[Job], growing: "_GrowingReport", expected: Forecast, profile: Path | None) -> int:
    parallel, ids = expected.parallel, [job.id for job in stale]
    source_facts.keep()  # of all that the jobs import: each would parse it, for a CPU second or two
    shutil.rmtree(state.folder() / ENDED, ignore_errors=True)
    circumstances = {"start": module_command(), "driver": state.this_process(), "slots": parallel}
    write_plan(stale, state.folder() / "plan.json", seconds=longest_seconds(stale), **circumstances)
    log = state.folder() / "snakemake.log"
    with log.open("w") as sink:
        engine = subprocess.Popen(
            _command(parallel, profile, ids), stdout=sink, stderr=subprocess.STDOUT, preexec_fn=_end_with_driver
        )
        try:
            _watch(engine, stale, growing, expected)
        except KeyboardInterrupt:
            _interrupt(engine)
            raise
    if engine.returncode < 0:
        _say(f"Snakemake was killed by signal {-engine.returncode}; what it had begun or queued ends as well")
        cancel_jobs(log)
    for last in filter(None, (state.load(job.id) for job in stale)):
        if last.status == "running":  # on another machine, whose processes are not seen from here
            last.killed().save()
    return engine.returncode


def _interrupt(engine: subprocess.Popen) -> None:
    """Stop Snakemake and its jobs at once, as Ctrl-C in a terminal does; kill those that do not stop."""
    family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    for signal_them in (lambda member: member.send_signal(signal.SIGINT), lambda member: member.kill()):
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                signal_them(member)
        psutil.wait_procs(family, timeout=STOPPING_S)
    engine.wait()


def _command(parallel: int, profile: Path | None, ids: list[str]) -> list[str]:
    command = [sys.executable, "-P", "-m", "snakemake", "--snakefile", str(SNAKEFILE)]
    command += ["--directory", str(state.folder())]
    command += ["--nolock", "--keep-going", "--rerun-incomplete", "--rerun-triggers", "mtime", "--show-failed-logs"]
    if FIRST in ids:
        command += ["--prioritize", f"{ENDED}/{FIRST}"]
    if profile:
        command += ["--workflow-profile", "none", "--profile", str(profile), *more_arguments(profile)]
        return [*command, "--resources", f"slots={10**6}"]
    return [*command, "--cores", str(max(cores(), parallel)), "--resources", f"slots={parallel}"]


def _end_with_driver() -> None:
    """Have Snakemake cancel its jobs and end when the driver is killed (Linux only; elsewhere jobs watch their driver).

    On SIGTERM it would wait for jobs on a cluster, and a new sweep would run them beside it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells have what runs in the background ignore it
    if sys.platform == "linux":
        die_with_parent(signal.SIGINT)


def _watch(engine: subprocess.Popen, jobs: list[Job], growing: "_GrowingReport", expected: Forecast) -> None:
    """Print a line whenever a job starts or ends, and each minute. At its end print what it found; the report grows."""
    began, told = time.time(), {}
    _say("starting Snakemake; the first notebook begins in some seconds")
    quiet_since_s = time.monotonic()
    while True:
        ended = engine.poll() is not None
        now = {job.id: last for job in jobs if (last := state.load(job.id)) and last.started >= began - 1}
        for id, last in now.items():
            if told.get(id) != last.status:
                told[id] = last.status
                took = "" if last.seconds is None else f" in {last.seconds:.0f} s"
                if last.status == "running" and id in expected.seconds:
                    took = f", about {duration(expected.seconds[id])}"
                _say(f"{id} {last.status}{took}  ({_progress(now, expected)})")
                if last.status != "running":
                    growing.add(id)
                quiet_since_s = time.monotonic()
        if ended:
            break
        if time.monotonic() - quiet_since_s >= QUIET_S:
            _say(f"{_still_running(now)}  ({_progress(now, expected)})")
            quiet_since_s = time.monotonic()
        time.sleep(0.5)


class _GrowingReport:
    """The report while notebooks run. Writing it takes some 0.3 s; where it takes long, most notebooks wait for it."""

    def __init__(self, jobs: list[Job], write: Write):
        self.jobs, self.write, self.next_s = {job.id: job for job in jobs}, write, 0.0

    def add(self, id: str) -> None:
        """Print what a notebook found, and write the report unless that disturbs the others too much."""
        begun_s = time.monotonic()
        if seen := read_meta(self.jobs[id].folder).seen:
            print(textwrap.fill(seen, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT), flush=True)
        if begun_s < self.next_s:
            return
        with contextlib.suppress(OSError):  # a full disk, which the notebooks tell
            index, is_first = self.write([*self.jobs.values()], running=True), not self.next_s
            took_s = time.monotonic() - begun_s
            self.next_s = time.monotonic() + (REPORT_PAUSE_S if took_s > REPORT_S else 0)
            if is_first:
                _say(f"the report so far, which grows with each notebook: {index}")


def _still_running(now: dict[str, state.State]) -> str:
    """Which jobs run and for how long."""
    running = [last for last in now.values() if last.status == "running"]
    words = [f"{last.id} for {duration(time.time() - last.started)}" for last in running]
    return f"still running: {', '.join(words)}" if words else "no notebook has begun yet"


def _progress(now: dict[str, state.State], expected: Forecast) -> str:
    running = sum(last.status == "running" for last in now.values())
    waiting = len(expected.jobs) - len(now)
    counts = f"{running} running · {len(now) - running} done · {waiting} waiting"
    if not running and not waiting:
        return counts
    left_s = expected.left_s(now)
    left = "time left unknown until one has run" if left_s is None else f"about {duration(left_s)} left"
    return f"{counts} · {left}"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
