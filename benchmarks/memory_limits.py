"""`sparse-offload run` in memory cgroups: whether each process runs or refuses in a line, and none is killed.

    python benchmarks/memory_limits.py FOLDER... [--draft FOLDER]

Folders are what `pack` wrote. Each runs as a whole process within 0.6, 0.8 and 1.2 GB without swap, with and without
`--dram`, with a short prompt, a long one, and 300 new tokens. It needs root, or a delegated cgroup: status 77 without.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import reports

from toolkit.measure.memory_group import MemoryGroup, missing

SKIPPED = 77
SENTENCE = "The library of Alexandria was a big one. "
LONG = 165  # sentences: some 1,500 tokens
KILLED = (-9, 137)


@dataclass(frozen=True)
class Result:
    """One process: what it was given, what it said and how it ended. Megabytes."""

    folder: str
    limit: float
    options: str
    verdict: str
    peak: float
    predicted: float
    line: str


def main() -> int:
    """Run all and print one table; 1 if a process was killed or failed, 77 where no cgroup can be made."""
    options = _options()
    if reason := missing():
        print(f"skipped: {reason}")
        return SKIPPED
    results = []
    for limit in options.limits:
        for folder in options.folders:
            for more in list(_variants(options))[: options.first]:
                results.append(_run(folder, limit, more))
                print(f"{folder} {limit:.0f} MB {results[-1].options}: {results[-1].verdict}", flush=True)
    table = pd.DataFrame(map(asdict, results))
    print(table.to_string(index=False, float_format="{:.0f}".format, na_rep="–", max_colwidth=90))
    reports.save("memory_limits", {"results": [asdict(result) for result in results]})
    return int(bool(set(table["verdict"]) - {"ran", "refused"}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--limits", nargs="+", type=float, default=[600, 800, 1200], help="in MB")
    parser.add_argument("--dram", nargs="+", default=["150MB", "600MB"], help="beside no --dram at all")
    parser.add_argument("--tokens", type=int, default=300, help="of the longest text")
    parser.add_argument("--first", type=int, help="only so many of the runs of a folder")
    return parser.parse_args()


def _variants(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Options of `run`: each budget with a short prompt; without one, a long prompt, a long text and a draft, too."""
    yield {"--max-new-tokens": "4"}
    for dram in options.dram:
        yield {"--dram": dram, "--max-new-tokens": "4"}
    yield {"--prompt": SENTENCE * LONG, "--max-new-tokens": "4"}
    yield {"--max-new-tokens": str(options.tokens)}
    if options.draft:
        yield {"--draft": str(options.draft), "--max-new-tokens": "8"}


def _run(folder: Path, limit: float, more: dict[str, str]) -> Result:
    given = {"--prompt": SENTENCE} | more
    words = [word for pair in given.items() for word in pair]
    command = [sys.executable, "-P", "-m", "toolkit", "run", str(folder), *words]
    with MemoryGroup() as group:
        group.limit(int(limit * 1e6))
        done = subprocess.run(
            command, preexec_fn=lambda: group.add(os.getpid()), capture_output=True, text=True, check=False
        )
    verdict = {0: "ran", 2: "refused"}.get(done.returncode, "failed")
    verdict = "KILLED" if done.returncode in KILLED else verdict
    others = [f"{name} {value}" for name, value in more.items() if name != "--prompt"]
    shown = " ".join(["long prompt"] * ("--prompt" in more) + others)
    last = (done.stderr.strip().splitlines() or [""])[-1] if verdict != "ran" else ""
    took = _number(r"the process took (\d+) MB", done.stderr)
    return Result(str(folder), limit, shown, verdict, took, _number(r"will take up to (\d+) MB", done.stderr), last)


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    return float(found[1]) if found else float("nan")


if __name__ == "__main__":
    sys.exit(main())
