"""Whole processes in memory cgroups on the same GGUF file: `sparse-offload run` as it is, and llama.cpp.

    python benchmarks/gguf_processes.py                          # qwen2.5-coder-1.5b at 1.3, 1.1, 1.0, 0.8 and 0.6 GB
    python benchmarks/gguf_processes.py --file my.gguf --limits 4 6
    python benchmarks/gguf_processes.py --draft small.gguf       # and with a draft
    python benchmarks/gguf_processes.py --twin llama2-7b         # 4 GB of random Q4_K_M blocks: 2, 3, 4 GB
    python benchmarks/gguf_processes.py --twin gpt-oss-20b       # 12 GB of random MXFP4 blocks: 3, 6, 9 GB

Each process runs within a limit that counts all of it: code, weights, buffers, cache, and pages of the file. Ours gets
it as `--memory`, too. llama.cpp is the one that was built for this machine (`python -m
toolkit.measure.llama_cpp_build`), or else a generic wheel. It runs in all ways of `llama_cpp.LOADS`, or in those of
`--loads`, and the best one counts. The turns follow each other, limit by limit; the file's pages are dropped before
each process. Each generates some tokens first; then `--tokens` are timed, without the prompt.

A row is printed as its process ends: tokens a second, MB read a token, the share of the disk's rate that these reads
make, and the process's own memory: ours at its peak, llama.cpp's at the end. The disk's rate is that of the toolkit's
reader on this file, taken at the start. A process that the system kills is `killed`, one that refuses the limit
`refused`. In a twin the router has random weights, so its experts are random, too, and hits are those of chance. Its
tokens are sampled, since a greedy text would soon repeat itself.

The last tables have the median of each way with its range, and of llama.cpp's best one. It writes
results/benchmarks/gguf_processes.json, and exits with 77 where no cgroup can be made. Let the machine be otherwise
idle. Twins are written into `--folder` once, and stay there.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import reports
from gguf_twins import TWINS, write_twin

from toolkit import downloads, memory_limits, paths
from toolkit.errors import UserError
from toolkit.measure import llama_cpp
from toolkit.measure.llama_cpp_process import KILLED, NoRoom, run_process
from toolkit.measure.memory_group import MemoryGroup, missing
from toolkit.models.gguf_header import read_header
from toolkit.offload.decoder.architecture import architecture_of
from toolkit.offload.decoder.weights import DecoderFile
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import drop_pages
from toolkit.storage.readers import open_reader

SKIPPED = 77
RIVAL = "llama.cpp"
MODEL = "qwen2.5-coder-1.5b"
LIMITS = {MODEL: (1.3, 1.1, 1.0, 0.8, 0.6), "llama2-7b": (4, 3, 2), "gpt-oss-20b": (9, 6, 3)}
PROMPT = "def quicksort(xs):"
TOKENS = (750, 11, 42)  # llama.cpp is asked by numbers: words of any vocabulary
WARM = 4  # tokens before the clock starts
LONGEST_S = 1800


@dataclass(frozen=True)
class Row:
    """One process. Bytes are megabytes; NaN where nothing is known."""

    way: str
    limit_gb: float
    turn: int
    verdict: str
    tokens_s: float = float("nan")
    mb_a_token: float = float("nan")
    of_disk: float = float("nan")
    own_mb: float = float("nan")
    first_s: float = float("nan")
    cpu_s: float = float("nan")
    build: str = ""
    note: str = ""


@dataclass(frozen=True)
class Task:
    """The file and the settings that all processes are given."""

    file: Path
    tokens: int
    sample: bool
    disk: float
    """Bytes a second."""


def main() -> int:
    """Run all; 77 where no cgroup can be made."""
    options = _options()
    if reason := missing() or (not options.ours and llama_cpp.missing()):
        print(f"skipped: {reason}")
        return SKIPPED
    file, name = _file(options)
    limits = options.limits or LIMITS.get(name, LIMITS[MODEL])
    task = Task(file, options.tokens, bool(options.twin), disk_rate(file))
    print(f"{file.name}: {file.stat().st_size / 1e6:.0f} MB; the disk gives {task.disk / 1e9:.2f} GB/s", flush=True)
    ways: dict[str, Callable] = {"ours": ours}
    if options.draft:
        ways["ours, drafted"] = partial(ours, more=("--draft", str(options.draft)))
    if not options.ours:
        print(f"llama.cpp: {llama_cpp.which()}", flush=True)
        ways |= {f"{RIVAL} {load}": partial(rival, load=load) for load in options.loads}
    _compile(task)
    rows = []
    for limit in limits:
        for turn in range(options.turns):
            for way, run in ways.items():
                drop_pages(file)
                rows.append(Row(way, limit, turn, **run(task, int(limit * 1e9))))
                print(shown(rows[-1]), flush=True)
    table = pd.DataFrame(map(asdict, rows))
    print(medians(table).to_markdown(index=False, floatfmt=".2f"))
    report = {"file": file.name, "disk_bytes_s": task.disk, "rows": [asdict(row) for row in rows]}
    reports.save("gguf_processes", report | {"load": reports.load_per_core()})
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help=f"a GGUF file (default: that of {MODEL}, downloaded once)")
    parser.add_argument("--twin", choices=TWINS, help="a file of random blocks with the shapes of this model instead")
    parser.add_argument("--folder", type=Path, default=paths.cache_dir() / "twins", help="where twins are kept")
    parser.add_argument("--limits", nargs="+", type=float, help="in GB (default: see above)")
    parser.add_argument("--tokens", type=int, default=32, help="that are timed (default: 32)")
    parser.add_argument("--turns", type=int, default=2, help="of each way and limit (default: 2)")
    parser.add_argument("--draft", type=Path, help="a GGUF file or a packed folder that drafts, in rows of its own")
    rivals = parser.add_mutually_exclusive_group()
    rivals.add_argument("--ours", action="store_true", help="without llama.cpp")
    loads = list(llama_cpp.LOADS)
    rivals.add_argument("--loads", nargs="+", choices=loads, default=loads, help="of llama.cpp (default: all)")
    return parser.parse_args()


def _file(options: argparse.Namespace) -> tuple[Path, str]:
    """The file, and the name of its limits."""
    if not options.twin:
        return options.file or downloads.fetch(MODEL), MODEL
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f"{options.twin}.gguf"
    if not file.exists():
        partial = file.with_suffix(".part")
        write_twin(options.twin, partial)
        partial.rename(file)
    return file, options.twin


def disk_rate(file: Path) -> float:
    """Bytes a second at which the toolkit reads the layers of a file past the page cache; the better of two."""
    header = read_header(file)
    weights = DecoderFile.of(header, architecture_of(header))
    layers = [*weights.layers, *(expert for experts in weights.experts for expert in experts)]
    reads = [read for layer in layers for read in layer.chunks]
    best = 0.0
    with open_reader(None, weights) as reader:
        for _ in range(2):
            nbytes, begun_s, slot = 0, time.perf_counter(), aligned_buffer(max(_end(read) for read in reads))
            for read in reads[: 1 << 9]:
                reader.read([read], slot)
                nbytes += int(read.sizes.sum())
            best = max(best, nbytes / (time.perf_counter() - begun_s))
    return best


def _end(read) -> int:
    return int((read.places + read.sizes).max())


def _compile(task: Task) -> None:
    """Have the kernels compiled and kept, without a limit: that takes memory once a machine."""
    if not isinstance(ours(task, memory_limits.free_bytes() * 9 // 10, tokens=8), dict):
        raise UserError("cannot run the file at all")


def ours(task: Task, limit: int, more: Sequence[str] = (), tokens: int | None = None) -> dict:
    """`sparse-offload run` within a limit."""
    count = tokens or task.tokens + WARM
    command = [sys.executable, "-P", "-m", "toolkit", "run", str(task.file), "--memory", f"{limit // 10**6}MB"]
    command += ["--prompt", PROMPT, "--max-new-tokens", str(count), *more]
    command += ["--temperature", "1"] if task.sample else []
    with MemoryGroup() as group:
        group.limit(limit)
        done = subprocess.run(
            command,
            preexec_fn=lambda: group.add(os.getpid()),
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [""])[-1]
        return {"verdict": "killed" if done.returncode in KILLED else "refused", "note": words[:300]}
    moved = _number(r"^ +read .* ([\d.]+)$", done.stderr)
    mb_a_token, speed = (0.0 if moved != moved else moved) / count, _number(r"then ([\d.]+) a second", done.stderr)
    found = re.search(r"[^;\n]*(in DRAM|of the experts)[^;\n]*", done.stderr)
    return {
        "verdict": "ran",
        "tokens_s": speed,
        "mb_a_token": mb_a_token,
        "of_disk": mb_a_token * 1e6 * speed / task.disk,
        "own_mb": _number(r"peak (\d+) of|took (\d+) MB", done.stderr),
        "note": found[0].strip() if found else "",
    }


def rival(task: Task, limit: int, load: str) -> dict:
    """llama.cpp within a limit; its clock is its own, for generated tokens."""
    try:
        process = run_process(task.file, limit, load, TOKENS, task.tokens, float(task.sample))
    except UserError as error:
        return {"verdict": "killed" if isinstance(error, NoRoom) else "failed", "note": str(error)[:300]}
    return {
        "verdict": "ran",
        "tokens_s": process.tokens_per_s,
        "mb_a_token": process.read_bytes / 1e6,
        "of_disk": process.read_bytes * process.tokens_per_s / task.disk,
        "own_mb": process.own_bytes / 1e6,
        "first_s": process.first_s,
        "cpu_s": process.cpu_s,
        "build": process.build,
    }


def medians(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each limit and way, and one for llama.cpp's quickest way: medians, and the range of the speed."""
    numbers = ["tokens_s", "mb_a_token", "of_disk", "own_mb", "first_s", "cpu_s"]
    groups = table.groupby(["limit_gb", "way"], sort=False)
    rows = groups[numbers].median()
    rows.insert(1, "tokens_s_low", groups["tokens_s"].min())
    rows.insert(2, "tokens_s_high", groups["tokens_s"].max())
    rows = rows.reset_index()
    rivals = rows[rows["way"].str.startswith(RIVAL) & rows["tokens_s"].notna()]
    best = rivals.loc[rivals.groupby("limit_gb", sort=False)["tokens_s"].idxmax()]
    best = best.assign(way="the best of them: " + best["way"])
    return pd.concat([rows, best]).sort_values("limit_gb", ascending=False, kind="stable")


def shown(row: Row) -> str:
    """A row as it is printed."""
    numbers = f"{row.tokens_s:7.2f} tokens/s {row.mb_a_token:8.0f} MB/token {row.of_disk:5.0%} of the disk"
    numbers += f" {row.own_mb:7.0f} MB of its own"
    words = numbers if row.verdict == "ran" else row.verdict
    return f"{row.limit_gb:5.2f} GB {row.way:20} {words}  {row.note}"


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text, re.MULTILINE)
    return float(next(group for group in found.groups() if group)) if found else float("nan")


if __name__ == "__main__":
    sys.exit(main())
