"""The command line behind `papermill_runs.sh`."""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

from toolkit import cache, paths
from toolkit.errors import Parser, UserError, run_command, whole
from toolkit.evidence.catalogue import PRESETS, listing, notebooks, select
from toolkit.files import disk_trouble_told
from toolkit.sweep.grid import ParameterGrid, read_grid, read_value, read_values
from toolkit.sweep.jobs import Job, cores, make_jobs
from toolkit.sweep.profiles import find_profile

FRESH = "fresh"  # the parameter that has measurements taken again: it makes no variant


def main(arguments: list[str] | None = None) -> int:
    """Parse, check everything, then run; 0 if all is well, 1 if a notebook failed, 2 for bad input."""

    def run() -> int:
        with disk_trouble_told(paths.results_dir()):  # for errors that name no file, such as a full disk's
            return _main(arguments)

    return run_command(run, stopped="stopped; the same command goes on from here")


def _main(arguments: list[str] | None) -> int:
    _make_folders_absolute()
    options, for_lab = _parser().parse_known_args(arguments)
    if for_lab and not options.lab:
        raise UserError(f"unrecognized arguments: {' '.join(for_lab)} (--help lists the options)")
    if options.list:
        print(listing(notebooks()))
        return 0
    if options.clean is not None:
        print(_clean(options.clean))
        return 0
    if options.lab:
        from toolkit.sweep import lab

        lab.start(for_lab, options.preset or "standard")
    settings = _settings(options)
    changed = {name: value for name, value in settings.items() if name != FRESH}
    base = paths.results_dir()
    if options.model:
        os.environ["TOOLKIT_RESULTS_DIR"] = str(paths.model_results_dir(options.model))
    if by_hand := {name: [value] for name, value in changed.items() if not (name == "model" and options.model)}:
        base = paths.results_dir()
        os.environ["TOOLKIT_RESULTS_DIR"] = str(paths.variant_dir(*ParameterGrid(by_hand).points))
    grid = read_grid(options.grid)
    if grid and "model" in grid.values:
        grid.values["model"] = [_model(name) if isinstance(name, str) else name for name in grid.values["model"]]
    profile = find_profile(options.profile, _called_from()) if options.profile else None
    if grid:
        os.environ["TOOLKIT_RESULTS_DIR"] = str(paths.grid_dir(grid.name))
    only_report = options.report_only or options.report_zip
    if not only_report:
        many = f", a grid of {len(grid):,} points" if grid else ""
        print(f"reading the notebooks and what they use: preset {options.preset or 'standard'}{many}", flush=True)
    jobs = make_jobs(options.only, options.preset or "standard", settings, options.jobs, grid)
    names = _check_names([job for job in jobs if not job.is_fresh()])
    if options.dry_run:
        print(_forecast(jobs))
        return 0
    from toolkit.evidence.report import Variant, pack
    from toolkit.sweep import driver

    write = partial(driver.write_report, variant=Variant(changed, base)) if changed else driver.write_report
    if grid:
        from toolkit.sweep import grid_report  # with what draws

        write = partial(grid_report.write_report, grid, changed)
    if only_report:
        index = write(jobs if grid else _of_any_preset(jobs, options), rebuild=True)
        print(f"report: {pack(index.parent) if options.report_zip else index}")
        return 0
    _fetch(names)
    return driver.run(jobs, options.jobs, profile, write)


def _clean(gigabytes: str) -> str:
    """Remove artefacts from the cache until at most so many GB are left, and say what went."""
    try:
        keep_gb = float(gigabytes)
    except ValueError:
        keep_gb = -1
    if not keep_gb >= 0:
        raise UserError(f"--clean {gigabytes}: expected the gigabytes that may stay, such as 20; 0 leaves nothing")
    removed, kept = cache.shrink(keep_gb * 1e9), cache.artefacts()
    lines = [f"removed {one.nbytes / 1e6:10,.1f} MB  {one.folder}" for one in removed]
    freed, left = (sum(one.nbytes for one in some) / 1e6 for some in (removed, kept))
    end = f"{len(removed)} removed, {freed:,.1f} MB freed; {len(kept)} left in {paths.cache_dir()}, {left:,.1f} MB"
    used = "; what a running process uses stays" if left > keep_gb * 1e3 else ""
    return "\n".join([*lines, end + used])


def _of_any_preset(jobs: list[Job], options: argparse.Namespace) -> list[Job]:
    """For a report without `--preset`: each notebook's job under the preset that its results were made with."""
    if options.preset:
        return jobs
    fresh = {
        job.id: job for name in PRESETS for job in make_jobs(options.only, name, _settings(options)) if job.is_fresh()
    }
    return [fresh.get(job.id, job) for job in jobs]


def _settings(options: argparse.Namespace) -> dict[str, object]:
    """`--set NAME=VALUE` and `--model ID` as parameters; a value that is not JSON is text, or a list between commas.

    Raises `UserError` for several values of a parameter that is a number.
    """
    known = [item for book in select(options.only) for item in book.parameters.items()]
    found, kinds = {}, {name: type(default) for name, default in known}
    for item in options.set:
        name, equals, text = item.partition("=")
        if not (name and equals):
            raise UserError(f"--set {item}: expected NAME=VALUE, such as sparsity=0.5")
        found[name], kind = read_value(text), kinds.get(name)
        if kind is list and not isinstance(found[name], list):
            found[name] = read_values(text)
        elif kind in (int, float) and len(read_values(text)) > 1:
            raise UserError(f"--set {item}: {name} takes one value; --grid {item} runs the notebooks with each")
    return found | ({"model": _model(options.model)} if options.model else {})


def _model(name: str) -> str:
    """A folder or a file as an absolute path, since notebooks run elsewhere; another name as it is."""
    place = _called_from() / name
    return str(place.resolve()) if place.exists() else name


def _make_folders_absolute() -> None:
    """The same for the folders that the environment names; and for results that only the current folder places."""
    if paths.is_installed():
        os.environ.setdefault("TOOLKIT_RESULTS_DIR", str(paths.results_dir()))
    for name in ("TOOLKIT_RESULTS_DIR", "TOOLKIT_CACHE_DIR"):
        if os.environ.get(name):
            os.environ[name] = str(_called_from() / os.environ[name])


def _called_from() -> Path:
    return Path(os.environ.get("TOOLKIT_CALLED_FROM", ".")).resolve()


def _check_names(jobs: list[Job]) -> set[str]:
    """Refuse a model, corpus or task that cannot be had before any notebook starts; return names of the first two."""
    given = [(kind.removeprefix("second_"), value) for job in jobs for kind, value in job.parameters.items()]
    names = {(kind, name) for kind, name in given if kind in ("model", "corpus") and name != "none"}
    if names:
        from toolkit.models import check_model
        from toolkit.quality import check_corpus

        for kind, name in sorted(names):
            {"model": check_model, "corpus": check_corpus}[kind](name)
    if tasks := {name for job in jobs for name in job.parameters.get("tasks", ())}:
        from toolkit.quality.harness import check_tasks

        check_tasks(sorted(tasks))
    return {name for _, name in names}


def _fetch(names: set[str]) -> None:
    """Download embedded models and text now, so that a missing network gives a one-line error."""
    from toolkit import downloads

    for name in sorted(names & downloads.DOWNLOADS.keys()):
        downloads.fetch(name)


def _forecast(jobs: list[Job]) -> str:
    lines, width = [], max(len(job.id) for job in jobs)
    for job in jobs:
        parameters = " ".join(f"{name}={json.dumps(value)}" for name, value in job.parameters.items())
        lines.append(f"{'up to date' if job.is_fresh() else 'to run':12}{job.id:{width}}  {parameters}")
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser(
        prog="./papermill_runs.sh",
        description="Run every notebook, headless, into results/, and write results/report/index.html.",
        epilog="Only what changed is run again: a parameter, a notebook, or a toolkit module that it uses.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--preset", metavar="NAME", help=f"{', '.join(PRESETS)} (default: standard)")
    add("--only", nargs="+", default=[], metavar="ID", help="only these notebooks or papers: endor/fig04 flash")
    add(
        "--model",
        metavar="ID",
        help="the model of every notebook that takes one: a name, a folder, a GGUF file or a Hugging Face id; results "
        "in results/models/ID/",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the notebooks that have it, a list as VALUE,VALUE; may be repeated; results in "
        "results/variants/",
    )
    add(
        "--grid",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="run once with each value, or with every combination if repeated; results in results/grid/",
    )
    jobs = min(cores(), max(2, cores() // 2))  # while one imports or draws, which takes one core, another computes
    add("--jobs", type=whole, default=jobs, metavar="N", help=f"notebooks at once, sharing the cores (default: {jobs})")
    add("--profile", metavar="NAME", help="run on a cluster by a Snakemake profile: slurm, or a folder of your own")
    add("--list", action="store_true", help="print the notebooks there are, and stop")
    add("--dry-run", action="store_true", help="print what would run with which parameters, and stop")
    add("--report-only", action="store_true", help="write the report anew from the results there are, and stop")
    add("--report-zip", action="store_true", help="the same as one file to mail, report.zip, with all pages and tables")
    told = "remove what the cache keeps, least recently used first, until GB are left, and stop; 0 removes all"
    add("--clean", metavar="GB", help=told)
    add(
        "--lab",
        action="store_true",
        help="open JupyterLab on copies of the notebooks, with a preset's parameters; further options go to it",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
