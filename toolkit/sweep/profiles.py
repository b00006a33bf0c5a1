"""Profiles of Snakemake, which say where notebooks run: on this machine, or on a cluster by its scheduler."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from toolkit import paths
from toolkit.errors import UserError, did_you_mean
from toolkit.records import load_yaml

BUILT_IN = ("local", "dryrun", "touch")  # executors that Snakemake has without a plugin
QUERIES = {"slurm": ["sinfo", "--noheader"]}  # a command that answers if the executor's scheduler does
ACCOUNTING = ["sacct", "--noheader", "--allocations"]  # by which the executor asks for states unless told otherwise
STATUS = "slurm-status-command"
PATIENCE_S = 30
EXECUTOR = re.compile("[a-z][a-z0-9-]{0,60}")
RUN_ID = re.compile(r"^SLURM run ID: (\S+)$", re.MULTILINE)  # in Snakemake's log: the name of all its jobs


def find_profile(name: str, called_from: Path) -> Path:
    """The folder of a profile: a folder of the user's, or one of `data/cluster/` by its name.

    Raises `UserError` if there is no such folder with a `config.yaml`, if the executor's plugin is not installed, or
    if its scheduler does not answer.
    """
    ours = paths.root() / "data" / "cluster"
    places = [called_from / name, ours / name]
    found = next((place for place in places if (place / "config.yaml").is_file()), None)
    if found is None:
        known = sorted(file.parent.name for file in ours.glob("*/config.yaml"))
        named = f"or one of: {', '.join(known)}{did_you_mean(name, known)}" if known else "by its path"
        raise UserError(f"--profile {name}: expected a folder with Snakemake's config.yaml, {named}")
    _check_executor(name, _config(found))
    return found.resolve()


def more_arguments(profile: Path) -> list[str]:
    """The settings that Snakemake needs beside a profile: without SLURM's accounting, to ask `squeue` for jobs' states.

    It would wait for `sacct` for ever. A profile that names the command is left alone.
    """
    config = _config(profile)
    if config.get("executor") != "slurm" or STATUS in config or _trouble(ACCOUNTING) is None:
        return []
    return [f"--{STATUS}", "squeue"]


def cancel_jobs(log: Path) -> None:
    """Take out of SLURM's queue what the run of Snakemake with this log left there. It does so itself unless killed."""
    found = RUN_ID.search(log.read_text(encoding="utf-8", errors="replace"))
    if found:
        subprocess.run(["scancel", "--name", found[1]], timeout=PATIENCE_S, check=False)


def _config(profile: Path) -> dict[str, object]:
    """The settings of a profile. Raises `UserError` for a file that holds something else."""
    file = profile / "config.yaml"
    config = load_yaml(file) or {}
    executor = config.get("executor", "local") if isinstance(config, dict) else None
    if not isinstance(executor, str) or not EXECUTOR.fullmatch(executor):
        raise UserError(f"{file}: expected settings of Snakemake by name, such as executor: slurm")
    return config


def _check_executor(name: str, config: Mapping[str, object]) -> None:
    executor = str(config.get("executor", "local"))
    plugin = f"snakemake-executor-plugin-{executor}"
    if executor not in BUILT_IN and importlib.util.find_spec(plugin.replace("-", "_")) is None:
        extra = "-c requirements.lock -e '.[cluster]'" if executor == "slurm" else plugin
        raise UserError(f"--profile {name}: {plugin} is not installed: python -m pip install {extra}")
    if executor in QUERIES and (trouble := _trouble(QUERIES[executor])):
        raise UserError(
            f"--profile {name}: the scheduler is not there: {trouble}; start on a login node of the cluster"
        )


def _trouble(query: list[str]) -> str | None:
    """Why a command of the scheduler gives no answer, in words; None if it gives one."""
    if shutil.which(query[0]) is None:
        return f"there is no command {query[0]}"
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{query[0]} gave no answer in {PATIENCE_S} s"
    return f"{query[0]}: {(asked.stderr.strip().splitlines() or ['failed'])[0]}" if asked.returncode else None
