"""Where the benchmarks' numbers go, and what the machine was doing meanwhile."""

import json
import os
from collections.abc import Mapping

from toolkit import paths
from toolkit.simulation.probe import describe


def load_per_core() -> float:
    """The machine's load average over its cores: well above ours, others were at work."""
    return os.getloadavg()[0] / os.cpu_count()


def save(name: str, report: Mapping[str, object]) -> None:
    """Write results/benchmarks/<name>.json."""
    target = paths.results_dir() / "benchmarks" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps({"machine": describe(), **report}, indent=1, default=str) + "\n")
    os.replace(partial, target)
