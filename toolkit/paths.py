"""Where files are: notebooks and data, what is kept, and results; in a checkout, or with an installed wheel."""

import os
import re
from functools import cache
from pathlib import Path

from toolkit.errors import UserError

RESULTS_SCHEMA = 2  # of what `Run.evidence` writes; results of another schema are out of date
NAME = "sparse-offload-toolkit"  # of the distribution, and of its folder in the user's cache
CONTENTS = "contents.ipynb"  # lists the notebooks that were copied into its folder
FOLDERS = ("data", "kernels", "notebooks")  # of the checkout, beside `toolkit/`; inside the package in a wheel
PACKAGE = Path(__file__).resolve().parent


@cache
def root() -> Path:
    """The folder that holds `notebooks/` and `data/`: the checkout or, installed from a wheel, the package itself.

    Raises `UserError` if neither has them.
    """
    for folder in (PACKAGE, PACKAGE.parent):
        if (folder / "notebooks").is_dir():
            return folder
    raise UserError(f"no notebooks in {PACKAGE} or beside it: install the wheel, or a checkout with `pip install -e .`")


def is_installed() -> bool:
    """Whether there is no checkout, so that nothing may be written beside the code."""
    return root() == PACKAGE


def below_root(name: str) -> str:
    """A name as in the checkout, such as `toolkit/formats/csr.py`, from `root()` on: the package may be the root."""
    return name.removeprefix("toolkit/") if is_installed() else name


def name_in_checkout(file: Path) -> str:
    """The inverse of `below_root`: the name of a file from the checkout's folder on, `toolkit/formats/csr.py`."""
    name = file.relative_to(root()).as_posix()
    return name if not is_installed() or name.split("/")[0] in FOLDERS else f"toolkit/{name}"


def checkout() -> Path:
    """The checkout. Raises `UserError` where the toolkit was installed without one."""
    if is_installed():
        raise UserError("this needs files that only the checkout has: clone it, and `pip install -e .` there")
    return root()


def cache_dir() -> Path:
    """The folder of what can be made again, slowly: `$TOOLKIT_CACHE_DIR`, else `data/cache/` of the checkout.

    Without a checkout it is the toolkit's folder in `$XDG_CACHE_HOME` or `~/.cache`.
    """
    if given := os.environ.get("TOOLKIT_CACHE_DIR"):
        return Path(given)
    if is_installed():
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME
    return root() / "data" / "cache"


def results_dir() -> Path:
    """Tables, figures and the report: `$TOOLKIT_RESULTS_DIR`, else `results/` in the checkout.

    Without a checkout it is `results/` beside the copied notebooks that we are among, else in the current folder.
    """
    if given := os.environ.get("TOOLKIT_RESULTS_DIR"):
        return Path(given)
    return (_among_copies() if is_installed() else root()) / "results"


def model_results_dir(model: str) -> Path:
    """Results and report of a sweep for a model that the user named, apart from those of the notebooks' own models."""
    parts = [part for part in re.split(r"[^A-Za-z0-9._-]+", model) if part.strip(".")]
    return results_dir() / "models" / ("-".join(parts) or "here")


def variant_dir(name: str) -> Path:
    """Results and report of a sweep with parameters that the user set, apart from those of the notebooks' own."""
    return results_dir() / "variants" / name


def grid_dir(name: str) -> Path:
    """Results of a grid of parameters, apart from those of single runs."""
    return results_dir() / "grid" / name


def lab_dir() -> Path:
    """The folder of trials in JupyterLab, apart from the sweep's results: copied notebooks and their results."""
    return results_dir() / "lab"


def _among_copies() -> Path:
    """The folder above that has the contents of copied notebooks; the current one if none has."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / CONTENTS).is_file()), here)
