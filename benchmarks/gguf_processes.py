"""Whole processes in memory cgroups on the same GGUF file: `sparse-offload run` as it is, and llama.cpp.

    python benchmarks/gguf_processes.py                          # qwen2.5-coder-1.5b at 1.3, 1.1, 1.0, 0.8 and 0.6 GB
    python benchmarks/gguf_processes.py --file my.gguf --limits 4 6
    python benchmarks/gguf_processes.py --draft small.gguf       # and with a draft
    python benchmarks/gguf_processes.py --twin llama2-7b         # 4 GB of random Q4_K_M blocks: 2, 3, 4 GB
    python benchmarks/gguf_processes.py --twin gpt-oss-20b       # 12 GB of random MXFP4 blocks: 3, 6, 9 GB

Each process runs within a limit that counts all of it: code, weights, buffers, cache, and pages of the file. Ours gets
it as `--memory`, too. llama.cpp runs in three ways, and the best one counts: "mapped", without copies; "repacked", with
repacked copies beside the mapped file, its default; "read", repacked without a mapping. The turns follow each other,
limit by limit; the file's pages are dropped before each process. Each generates some tokens first; then `--tokens` are
timed, without the prompt.

A row is printed as its process ends: tokens a second, MB read a token, the share of the disk's rate that these reads
make, and the peak of the process's own memory. The disk's rate is that of the toolkit's reader on this file, taken at
the start. A process that the system kills is `killed`, one that refuses the limit `refused`. In a twin the router has
random weights, so its experts are random, too; its tokens are sampled, since a greedy text would soon repeat itself.

The last table has the median of each way. It writes results/benchmarks/gguf_processes.json, and exits with 77 where no
cgroup can be made. Let the machine be otherwise idle. Twins are written into `--folder` once, and stay there.
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
import torch
from gguf_twins import TWINS, write_twin

from toolkit import downloads, memory_limits, paths
from toolkit.errors import UserError
from toolkit.measure import llama_cpp, llama_cpp_driver
from toolkit.measure.child import Child
from toolkit.measure.memory_group import MemoryGroup, missing
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import drop_pages
from toolkit.storage.gguf_store import GgufStore
from toolkit.storage.readers import open_reader

SKIPPED = 77
HOW = {"mapped": (), "repacked": (llama_cpp_driver.REPACKED,), "read": (llama_cpp_driver.LOADED,)}
MODEL = "qwen2.5-coder-1.5b"
LIMITS = {MODEL: (1.3, 1.1, 1.0, 0.8, 0.6), "llama2-7b": (4, 3, 2), "gpt-oss-20b": (9, 6, 3)}
PROMPT = "def quicksort(xs):"
TOKENS = (750, 11, 42)  # llama.cpp is asked by numbers: words of any vocabulary
WARM = 4  # tokens before the clock starts
KILLED = (-9, 137)
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
    peak_mb: float = float("nan")
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
        ways |= {f"llama.cpp {how}": partial(rival, how=how) for how in HOW}
    _compile(task)
    rows = []
    for limit in limits:
        for turn in range(options.turns):
            for way, run in ways.items():
                drop_pages(file)
                rows.append(Row(way, limit, turn, **run(task, int(limit * 1e9))))
                print(shown(rows[-1]), flush=True)
    table = pd.DataFrame(map(asdict, rows))
    medians = table.groupby(["limit_gb", "way"], sort=False)[["tokens_s", "mb_a_token", "of_disk", "peak_mb"]].median()
    print(medians.reset_index().to_markdown(index=False, floatfmt=".2f"))
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
    parser.add_argument("--ours", action="store_true", help="without llama.cpp")
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
    store = GgufStore.open(file)
    layers = list(store.layers.values())
    reads = [read for layer in layers for read in getattr(layer, "chunks", None) or _of_experts(layer)]
    best = 0.0
    with open_reader(None, store) as reader:
        for _ in range(2):
            nbytes, begun_s, slot = 0, time.perf_counter(), aligned_buffer(max(_end(read) for read in reads))
            for read in reads[: 1 << 9]:
                reader.read([read], slot)
                nbytes += int(read.sizes.sum())
            best = max(best, nbytes / (time.perf_counter() - begun_s))
    return best


def _of_experts(layer) -> list:
    return [read for expert in layer.ops.values() for read in expert.chunks]


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
    command += ["--prompt", PROMPT, "--max-new-tokens", str(count), *more, *(["--sample"] if task.sample else [])]
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
    found = re.search(r"[^;\n]*(layers in DRAM|of the experts)[^;\n]*", done.stderr)
    return {
        "verdict": "ran",
        "tokens_s": speed,
        "mb_a_token": mb_a_token,
        "of_disk": mb_a_token * 1e6 * speed / task.disk,
        "peak_mb": _number(r"peak (\d+) of|took (\d+) MB", done.stderr),
        "note": found[0].strip() if found else "",
    }


def rival(task: Task, limit: int, how: str) -> dict:
    """llama.cpp within a limit; its clock is its own, for generated tokens."""
    context = str(task.tokens + WARM + len(TOKENS) + 8)
    command = [llama_cpp.interpreter(), "-I", "-B", llama_cpp_driver.__file__, task.file, str(torch.get_num_threads())]
    command += [context, *HOW[how]]
    with MemoryGroup() as group:
        group.limit(limit)
        child = Child("llama.cpp", command)
        try:
            group.add(child.process.pid)
            child.answer()
            child.ask(tokens=list(TOKENS), generate=WARM, temperature=float(task.sample))
            found = child.ask(tokens=list(TOKENS), generate=task.tokens, temperature=float(task.sample))
            peak = group.other_bytes / 1e6
        except UserError as error:
            return {"verdict": "killed" if child.process.wait() in KILLED else "failed", "note": str(error)[:300]}
        finally:
            child.close()
    read, speed = found["read_bytes"] / task.tokens, 1 / found["seconds"]
    return {
        "verdict": "ran",
        "tokens_s": speed,
        "mb_a_token": read / 1e6,
        "of_disk": read * speed / task.disk,
        "peak_mb": peak,
    }


def shown(row: Row) -> str:
    """A row as it is printed."""
    numbers = f"{row.tokens_s:7.2f} tokens/s {row.mb_a_token:8.0f} MB/token {row.of_disk:5.0%} of the disk"
    numbers += f" {row.peak_mb:7.0f} MB peak"
    words = numbers if row.verdict == "ran" else row.verdict
    return f"{row.limit_gb:5.2f} GB {row.way:20} {words}  {row.note}"


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text, re.MULTILINE)
    return float(next(group for group in found.groups() if group)) if found else float("nan")


if __name__ == "__main__":
    sys.exit(main())
