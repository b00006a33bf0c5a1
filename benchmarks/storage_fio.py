"""Our reader beside fio: the same file, pattern, chunk and threads, O_DIRECT, one read at a time a thread.

    python benchmarks/storage_fio.py [--folder DIR] [--file-mib 1024] [--read-s 0.4] [--repetitions 15] [--markdown]

fio runs twice: as it comes (`fio_pages`), reading into ordinary memory, and reading into huge pages as we do (`fio`).
The three take turns, since a shared disk drifts by more than they differ: the ratio is the median over the turns of
ours over fio's in huge pages of the same turn. Prints it with its quartiles (a wide spread means that the machine was
not quiet) and writes results/benchmarks/storage_fio.json. Goal: within 10 % for every pattern.
"""

import argparse
import sys
import time
from pathlib import Path

import fio
import pandas as pd
import reports

from toolkit.files import scratch_folder
from toolkit.machines import disk
from toolkit.machines.probe import KIB, MIB
from toolkit.measure.fio import read_gb_s
from toolkit.storage.direct import OpenFile, open_file

PATTERNS = [
    ("random", 4 * KIB, 1),
    ("random", 4 * KIB, 16),
    ("random", 32 * KIB, 4),
    ("random", 32 * KIB, 32),
    ("random", 128 * KIB, 4),
    ("random", 1 * MIB, 4),
    ("sequential", 128 * KIB, 4),
    ("sequential", 1 * MIB, 1),
    ("sequential", 1 * MIB, 4),
]
GOAL = 0.10


def main() -> int:
    """Compare pattern by pattern; 0 if all are within the goal, 1 if not, 77 without fio."""
    options = _options()
    if fio.missing():
        return fio.SKIPPED
    with scratch_folder(options.folder) as folder:
        path = folder / "data.bin"
        fio.write_file(path, options.file_mib * MIB)
        with open_file(path) as file:
            rows = pd.DataFrame(_measure(path, file, options))
            mode = file.mode
    table = _compare(rows)
    print(_markdown(table) if options.markdown else table.to_string(index=False, float_format="{:.3f}".format))
    worst = float((table["ratio"] - 1).abs().max())
    load = reports.load_per_core()
    print(f"mode {mode}; furthest from fio: {worst:.1%} (goal {GOAL:.0%}); load a core at the end {load:.1f}")
    settings = {name: value for name, value in vars(options).items() if name not in ("folder", "markdown")}
    report = {"mode": mode, "load_per_core": load, "settings": settings}
    reports.save("storage_fio", report | {"rows": table.to_dict("records"), "raw": rows.to_dict("records")})
    return int(worst > GOAL)


def _measure(path: Path, file: OpenFile, options: argparse.Namespace) -> list[dict]:
    rows = []
    for repetition in range(options.repetitions):
        for pattern, chunk, threads in PATTERNS:
            tools = {
                "ours": lambda: disk.read(file, pattern, chunk, threads, options.read_s, repetition).gb_s,  # noqa: B023
                "fio": lambda: _fio(path, file, pattern, chunk, threads, options.read_s, True),  # noqa: B023
                "fio_pages": lambda: _fio(path, file, pattern, chunk, threads, options.read_s, False),  # noqa: B023
            }
            turn = repetition % len(tools)
            for tool in [*tools][turn:] + [*tools][:turn]:
                cell = {"pattern": pattern, "chunk_kib": chunk // KIB, "threads": threads}
                time.sleep(fio.REST_S)
                rows.append(cell | {"repetition": repetition, "tool": tool, "gb_s": tools[tool]()})
    return rows


def _compare(rows: pd.DataFrame) -> pd.DataFrame:
    """Each tool's median bandwidth, and median and quartiles of the turns' ratios of ours to fio's."""
    cell = ["pattern", "chunk_kib", "threads"]
    turns = rows.pivot_table(index=[*cell, "repetition"], columns="tool", values="gb_s", sort=False)
    turns["ratio"] = turns["ours"] / turns["fio"]
    grouped = turns.groupby(level=cell, sort=False)
    table = grouped.median()
    table["low"], table["high"] = grouped["ratio"].quantile(0.25), grouped["ratio"].quantile(0.75)
    return table.reset_index()


def _markdown(table: pd.DataFrame) -> str:
    head = "| pattern | chunk, KiB | threads | fio, small pages | fio | ours, GB/s | ours / fio | quartiles |"
    columns = ("pattern", "chunk_kib", "threads", "fio_pages", "fio", "ours", "ratio", "low", "high")
    line = "| {} | {} | {} | {:.3f} | {:.3f} | {:.3f} | {:.2f} | {:.2f} to {:.2f} |"
    rows = [line.format(*row) for row in table[list(columns)].itertuples(index=False)]
    return "\n".join([head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", *rows])


def _fio(path: Path, file: OpenFile, pattern: str, chunk: int, threads: int, seconds: float, huge: bool) -> float:
    words = {
        "rw": {"random": "randread", "sequential": "read"}[pattern],
        "bs": chunk,
        "numjobs": threads,
        "ioengine": "psync",
        "time_based": 1,
        "runtime": f"{seconds * 1000:.0f}ms",
    }
    if pattern == "sequential":  # each thread its own stretch, as ours
        share = file.size_bytes // chunk // threads * chunk
        words |= {"offset_increment": share, "size": share}
    return read_gb_s(path, file.mode, words, huge)


def _options() -> argparse.Namespace:
    parser = reports.disk_parser(__doc__, repetitions=15)
    parser.add_argument("--file-mib", type=int, default=1024)
    parser.add_argument("--read-s", type=float, default=0.4, help="seconds of each reading")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
