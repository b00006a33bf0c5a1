"""`sparse-offload pack` in memory cgroups: the memory and the time of each method, and whether what it writes runs.

    python benchmarks/packs.py MODEL "wanda" "spqr --head spqr" "dense --int8" [--limit 2GB] [--run 700MB] [--kill 2]

Each way is `--method` with its options. It packs as a whole process in a memory cgroup without swap, and what it wrote
runs in a cgroup of `--run`. `peak` is what the cgroup counts beside pages of files, 20 times a second. With `--kill`
the process is killed behind so many blocks, and the same command goes on. `--first` stops for good behind so many
blocks. It needs root, or a delegated cgroup: status 77 without.
"""

import argparse
import resource
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import reports
from limited import SKIPPED, run_limited

from toolkit.measure.memory_group import missing
from toolkit.memory_limits import bytes_of
from toolkit.storage.unfinished import folder_of

PROMPT = "def quicksort(xs):"


@dataclass(frozen=True)
class Result:
    """One process: how it ended, what it took, and its last line. Megabytes."""

    way: str
    limit: float
    verdict: str
    seconds: float
    cpu_seconds: float
    peak: float
    load: float
    line: str


def main() -> int:
    """Run all and print one table; 1 if a process failed or the system killed it, 77 where no cgroup can be made."""
    options = _options()
    if reason := missing():
        print(f"skipped: {reason}")
        return SKIPPED
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for way in options.ways:
            results += _packed(options, way, Path(folder) / "packed")
    table = pd.DataFrame(map(asdict, results))
    print(table.to_string(index=False, float_format="{:.4g}".format, max_colwidth=160))
    reports.save("packs", {"model": options.model, "results": [asdict(result) for result in results]})
    return int(bool(set(table["verdict"]) - {"done", "refused", "stopped"}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--limit", default="2GB", help="of the process that packs")
    parser.add_argument("--run", default="700MB", help="of the one that runs what was packed")
    parser.add_argument("--kill", type=int, help="kill the process behind so many blocks, and go on")
    parser.add_argument("--first", type=int, help="stop behind so many blocks")
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    return parser.parse_args()


def _packed(options: argparse.Namespace, way: str, out: Path) -> list[Result]:
    """Pack one way, and run it; what was written goes in the end."""
    words = ["pack", options.model, "--method", *shlex.split(way), "--no-evaluate", "--out", str(out)]
    results = []
    for blocks in filter(None, (options.kill, options.first)):
        results.append(_run(f"{way}, stopped behind block {blocks}", words, options.limit, out, blocks))
    if not options.first:
        results.append(_run(way, words, options.limit, out))
        if out.exists():
            texts = ["run", str(out), "--memory", options.run, "--prompt", PROMPT, "--max-new-tokens", "8"]
            results.append(_run(f"run {way}", texts, options.run, out))
    for place in (out, folder_of(out)):
        shutil.rmtree(place, ignore_errors=True)
    return results


def _run(name: str, words: list[str], limit: str, out: Path, blocks: int | None = None) -> Result:
    """One process in a cgroup of its own, killed behind so many blocks."""

    def written() -> bool:
        return blocks is not None and len(list(folder_of(out).glob("beside-*"))) >= blocks

    limit_bytes = bytes_of("limit", limit)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = run_limited(words, limit_bytes, stops=written)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    verdict = {0: "done", 2: "refused"}.get(ended.status, "failed")
    if ended.killed:
        verdict = "stopped" if ended.stopped else "KILLED"
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds, load = time.perf_counter() - start, reports.load_per_core()
    result = Result(name, limit_bytes / 1e6, verdict, seconds, cpu, ended.peak_bytes / 1e6, load, ended.last_line)
    print(result, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
