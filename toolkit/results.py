"""What a notebook leaves behind: a tidy table, figures and the circumstances that made them.

run = Run("endor/fig04", globals())
...
run.save(table, figures={"sizes": figure}, evidence="measured")
"""

import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from toolkit import paths
from toolkit.downloads import DOWNLOADS
from toolkit.errors import UserError
from toolkit.parameters import read_parameters

EVIDENCE = ("measured", "modelled", "published")
VERSIONED = ("torch", "transformers", "numba", "numpy", "lm-eval", "datasets", "pandas", "safetensors")


class Run:
    """One execution of a notebook, from its parameters to its results.

    `namespace` is the notebook's `globals()`: the values of the names that its `parameters` cell assigns are
    recorded, and `seed`, where it is among them, seeds Python, NumPy and torch.
    Results go to `results/<identifier>/`; under the sweep to a staging folder that replaces it once all is written.
    """

    def __init__(self, identifier: str, namespace: Mapping[str, object]):
        from toolkit.sweep.catalogue import find

        names = read_parameters(find(identifier).path)
        self.identifier = identifier
        self.parameters = {name: namespace[name] for name in names}
        self.started = time.time()
        if "seed" in self.parameters:
            seed_everything(self.parameters["seed"])

    @property
    def folder(self) -> Path:
        """Where this run's results go."""
        return Path(os.environ.get("TOOLKIT_STAGING_DIR") or paths.results_dir() / self.identifier)

    def save(
        self,
        table: pd.DataFrame,
        figures: Mapping[str, Figure] = MappingProxyType({}),
        evidence: str | None = None,
        comparison: pd.DataFrame | None = None,
    ) -> Path:
        """Write `table` (CSV and Parquet), `figures` (SVG and PNG), the comparison with the paper and `meta.json`.

        Every row says its evidence: in a column of that name, or by `evidence` for all of them.
        Raises `UserError` for an empty table or an unknown kind of evidence.
        """
        table = table if evidence is None else table.assign(evidence=evidence)
        _check(table, self.identifier)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_table(self.folder / "table", table)
        if comparison is not None:
            _write_table(self.folder / "comparison", comparison)
        for name, figure in figures.items():
            for suffix in (".svg", ".png"):
                _replace(self.folder / (name + suffix), lambda path: figure.savefig(path, bbox_inches="tight"))  # noqa: B023 (called at once)
        meta = self._meta(table, figures, comparison)
        _replace(self.folder / "meta.json", lambda path: path.write_text(json.dumps(meta, indent=1)))
        return self.folder

    def _meta(self, table, figures, comparison) -> dict:
        verdicts = [] if comparison is None else comparison["verdict"].tolist()
        return {
            "schema": paths.RESULTS_SCHEMA,
            "id": self.identifier,
            "parameters": self.parameters,
            "inputs": _inputs(self.parameters),
            "evidence": sorted(table["evidence"].unique()),
            "figures": sorted(figures),
            "verdicts": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
            "wall_s": round(time.time() - self.started, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **provenance(),
        }


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (libraries that we call still use it)
    torch.manual_seed(seed)


def provenance() -> dict[str, object]:
    """Code, versions and machine: what someone needs who gets another number."""
    return {
        "git": _git("rev-parse", "HEAD") or "unknown",
        "git_dirty": bool(_git("status", "--porcelain")),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONED},
        "cpu": cpu_name(),
        "gpu": _gpu_name(),
        "threads": int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "platform": platform.platform(),
    }


def cpu_name() -> str:
    """The processor's name and core count, as the system gives them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _inputs(parameters: Mapping[str, object]) -> dict[str, str]:
    """Checksums of the embedded model and text that the parameters name."""
    chosen = {parameters.get("model"), parameters.get("corpus")} & DOWNLOADS.keys()
    return {name: f"sha256:{DOWNLOADS[name].sha256}" for name in sorted(chosen)}


def _gpu_name() -> str | None:
    torch = sys.modules.get("torch")  # a notebook that did not import torch used no GPU
    return torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=paths.root(), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _check(table: pd.DataFrame, identifier: str) -> None:
    if table.empty:
        raise UserError(f"{identifier}: the table to save is empty")
    if "evidence" not in table:
        raise UserError(f"{identifier}: no column 'evidence'; pass evidence= one of {', '.join(EVIDENCE)}")
    if unknown := set(table["evidence"]) - set(EVIDENCE):
        raise UserError(f"{identifier}: evidence {sorted(map(str, unknown))}; expected one of {', '.join(EVIDENCE)}")


def _write_table(stem: Path, table: pd.DataFrame) -> None:
    _replace(stem.with_suffix(".csv"), lambda path: table.to_csv(path, index=False))
    _replace(stem.with_suffix(".parquet"), lambda path: table.to_parquet(path, index=False))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, then rename: a reader never sees half a file."""
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
