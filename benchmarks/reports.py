"""Where the benchmarks' numbers go, and what the machine was doing meanwhile."""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit import paths
from toolkit.files import make_folder, replacing


def load_per_core() -> float:
    """The machine's load average over its cores: well above ours, others were at work."""
    return os.getloadavg()[0] / os.cpu_count()


def minima(runs: Mapping[str, Callable[[], object]], repetitions: int, pause_s: float) -> dict[str, float]:
    """The least seconds of each run. Runs take turns, after one that warms up, and a pause comes before each."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(repetitions):
        for name, run in runs.items():
            time.sleep(pause_s)
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def disk_parser(description: str, repetitions: int) -> argparse.ArgumentParser:
    """The options that benchmarks of a disk share: `--folder`, `--repetitions` and `--markdown`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=paths.cache_dir(), help="folder on the disk to measure")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--markdown", action="store_true")
    return parser


def save(name: str, report: Mapping[str, object]) -> None:
    """Write results/benchmarks/<name>.json."""
    from toolkit.machines.probe import describe  # imports pandas, which `gpu.py` does without

    target = paths.results_dir() / "benchmarks" / f"{name}.json"
    make_folder(target.parent)
    with replacing(target) as temporary:
        temporary.write_text(json.dumps({"machine": describe(), **report}, indent=1, default=str) + "\n")
