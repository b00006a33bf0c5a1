"""The circumstances of a number: code, versions and machine."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

from toolkit import paths
from toolkit.extras import installed_versions

VERSIONED = ("torch", "transformers", "numba", "numpy", "lm-eval", "datasets", "pandas", "safetensors")


def provenance() -> dict[str, object]:
    """Code, versions and machine: the reasons why someone else may get another number."""
    return {
        **_code(),
        "python": platform.python_version(),
        "versions": installed_versions(VERSIONED),
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


def _gpu_name() -> str | None:
    torch = sys.modules.get("torch")  # a notebook that did not import torch used no GPU
    return torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None


def _code() -> dict[str, object]:
    """The commit, or the version of an installed wheel: a repository around it would be another project's."""
    if paths.is_installed():
        return {"git": f"v{importlib.metadata.version(paths.NAME)}", "git_dirty": False}
    return {"git": _git("rev-parse", "HEAD") or "unknown", "git_dirty": bool(_git("status", "--porcelain"))}


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=paths.root(), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
