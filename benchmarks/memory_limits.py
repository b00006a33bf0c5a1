"""`sparse-offload run` in memory cgroups: whether each process runs or refuses in a line, and none is killed.

    python benchmarks/memory_limits.py FOLDER... [--draft FOLDER] [--limits 600 800 1200]

Folders are what `pack` wrote, or GGUF files. Each runs as a whole process in a memory cgroup of each limit without
swap: with `--memory` of exactly the cgroup's size, with a short prompt, one of some 2,000 tokens, and 300 new tokens;
then without it, with and without `--dram`. `peak` is what the process says, `group` what the cgroup counts beside pages
of files, 20 times a second. `share` is the peak over the limit: weights fill it where the folder is large enough. It
needs root, or a delegated cgroup: status 77 without.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import reports
from limited import SKIPPED, run_limited

from toolkit.measure.memory_group import missing

SENTENCE = "The library of Alexandria was a big one. "
LONG = 215  # sentences: some 2,000 tokens
LIMIT = "{limit:.0f}MB"  # of the process: the cgroup's own


@dataclass(frozen=True)
class Result:
    """One process: what it was given, what it said and how it ended. Megabytes."""

    folder: str
    limit: float
    options: str
    verdict: str
    peak: float
    group: float
    share: float
    predicted: float
    tokens_s: float
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
    print(table.to_string(index=False, float_format="{:.4g}".format, na_rep="–", max_colwidth=90))
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
    """Options of `run`: those with the limit of the process, then each budget with a short prompt, or without one."""
    of_process = {"--memory": LIMIT}
    yield of_process | {"--max-new-tokens": "4"}
    yield of_process | {"--prompt": SENTENCE * LONG, "--max-new-tokens": "4"}
    yield of_process | {"--max-new-tokens": str(options.tokens)}
    if options.draft:
        yield of_process | {"--draft": str(options.draft), "--max-new-tokens": str(options.tokens)}
    yield {"--max-new-tokens": "4"}
    for dram in options.dram:
        yield {"--dram": dram, "--max-new-tokens": "4"}
    yield {"--prompt": SENTENCE * LONG, "--max-new-tokens": "4"}


def _run(folder: Path, limit: float, more: dict[str, str]) -> Result:
    given = {"--prompt": SENTENCE} | {name: value.format(limit=limit) for name, value in more.items()}
    words = [word for pair in given.items() for word in pair]
    ended = run_limited(["run", str(folder), *words], int(limit * 1e6), quiet=True)
    verdict = {0: "ran", 2: "refused"}.get(ended.status, "failed")
    verdict = "KILLED" if ended.killed else verdict
    others = [f"{name} {value}".format(limit=limit) for name, value in more.items() if name != "--prompt"]
    shown = " ".join(["long prompt"] * ("--prompt" in more) + others)
    last = ended.last_line if verdict != "ran" else ""
    took = _number(r"(?:the process took|^peak) (\d+) ", ended.said)
    if took > limit:
        verdict = "OVER"
    rate = _number(r"then ([\d.]+) a second", ended.said)
    predicted = _number(r"will take up to (\d+) MB", ended.said)
    other = ended.peak_bytes / 1e6
    return Result(str(folder), limit, shown, verdict, took, other, took / limit, predicted, rate, last)


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text, re.MULTILINE)
    return float(found[1]) if found else float("nan")


if __name__ == "__main__":
    sys.exit(main())
