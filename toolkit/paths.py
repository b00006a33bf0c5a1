"""Where the checkout keeps its files."""

import os
import re
from pathlib import Path

from toolkit.errors import UserError

RESULTS_SCHEMA = 2  # of what `Run.save` writes; results of another schema are out of date


def root() -> Path:
    """The checkout: the folder that holds `notebooks/` and `data/` beside this package.

    Raises `UserError` if the package was installed without its checkout.
    """
    folder = Path(__file__).resolve().parents[1]
    if not (folder / "notebooks").is_dir():
        raise UserError(f"no notebooks beside {folder / 'toolkit'}: install from a checkout with `pip install -e .`")
    return folder


def cache_dir() -> Path:
    """What takes long to make and can be made again: `data/cache/`, or `$TOOLKIT_CACHE_DIR`."""
    return Path(os.environ.get("TOOLKIT_CACHE_DIR") or root() / "data" / "cache")


def results_dir() -> Path:
    """Tables, figures and the report: `results/`, or `$TOOLKIT_RESULTS_DIR`."""
    return Path(os.environ.get("TOOLKIT_RESULTS_DIR") or root() / "results")


def model_results_dir(model: str) -> Path:
    """Results and report of a sweep for a model that the user named, apart from those of the notebooks' own models."""
    parts = [part for part in re.split(r"[^A-Za-z0-9._-]+", model) if part.strip(".")]
    return results_dir() / "models" / ("-".join(parts) or "here")


def lab_dir() -> Path:
    """What is tried out in JupyterLab, apart from the sweep's results: copies of the notebooks, and what they save."""
    return results_dir() / "lab"
