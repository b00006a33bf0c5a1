"""Profiles of Snakemake, which say where notebooks run: on this machine, or on a cluster by its scheduler."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

from toolkit import paths
from toolkit.errors import UserError, did_you_mean
from toolkit.records import load_yaml

BUILT_IN = ("local", "dryrun", "touch")  # executors that Snakemake has without a plugin
QUERIES = {"slurm": ["sinfo", "--noheader"]}  # a command that answers if the executor's scheduler does
PATIENCE_S = 30


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
    _check_executor(name, load_yaml(found / "config.yaml"))
    return found.resolve()


def _check_executor(name: str, config: object) -> None:
    executor = str(config.get("executor", "local")) if isinstance(config, dict) else "local"
    plugin = f"snakemake-executor-plugin-{executor}"
    if executor not in BUILT_IN and importlib.util.find_spec(plugin.replace("-", "_")) is None:
        extra = "-c requirements.lock -e '.[cluster]'" if executor == "slurm" else plugin
        raise UserError(f"--profile {name}: {plugin} is not installed: python -m pip install {extra}")
    if executor in QUERIES:
        _ask(name, QUERIES[executor])


def _ask(name: str, query: list[str]) -> None:
    """Raise `UserError` unless the scheduler answers."""
    if shutil.which(query[0]) is None:
        raise UserError(f"--profile {name}: no scheduler here: command {query[0]} is not there; start on a login node")
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"--profile {name}: {query[0]} gave no answer in {PATIENCE_S} s") from None
    if asked.returncode:
        words = (asked.stderr.strip().splitlines() or ["no answer"])[0]
        raise UserError(f"--profile {name}: the scheduler does not answer {query[0]}: {words}")
