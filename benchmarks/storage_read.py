"""A layer read from a store, by each of our readers, beside the best that fio makes of the same file.

    python benchmarks/storage_read.py [--folder DIR] [--layer-mib 384] [--repetitions 11] [--tune] [--markdown]

Each reads one run of a shard, whole and in order (384 MiB: ENDOR's largest matrix, packed), past the page cache
and into huge pages. fio may choose its engine (psync, libaio, io_uring), block size, threads and queue depth; all of
them and our readers take turns, since a shared disk drifts by more than they differ. The best of fio's settings is the
one with the highest median; a reader's ratio is the median over the turns of its rate over that setting's in the same
turn, with quartiles. `--tune` lists our readers with other chunks and threads, too. Writes
results/benchmarks/storage_read.json. Goal: at least 0.9.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import fio
import pandas as pd
import reports

from toolkit.errors import UserError
from toolkit.files import scratch_folder
from toolkit.machines.probe import MIB
from toolkit.measure.fio import read_gb_s
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.chunks import in_line
from toolkit.storage.direct import StoredFile
from toolkit.storage.readers import READERS, Reader

SHARD = "layer.bin"
RIVALS = {  # engine, block in MiB, threads, queue depth
    "psync, 1 MiB, 1 thread": ("psync", 1, 1, 1),
    "psync, 1 MiB, 4 threads": ("psync", 1, 4, 1),
    "psync, 1 MiB, 8 threads": ("psync", 1, 8, 1),
    "psync, 4 MiB, 4 threads": ("psync", 4, 4, 1),
    "libaio, 1 MiB, depth 8": ("libaio", 1, 1, 8),
    "libaio, 1 MiB, depth 32": ("libaio", 1, 1, 32),
    "io_uring, 1 MiB, depth 8": ("io_uring", 1, 1, 8),
    "io_uring, 1 MiB, depth 32": ("io_uring", 1, 1, 32),
    "io_uring, 4 MiB, depth 8": ("io_uring", 4, 1, 8),
}
OURS = {"threads": ("threads", {}), "aio": ("aio", {})}
TUNED = {
    f"{name}, {chunk} MiB, {depth}": (name, {"chunk_bytes": chunk * MIB, "depth": depth})
    for name, depths in (("threads", (2, 4, 8)), ("aio", (8, 64)))
    for chunk in (1, 2, 4)
    for depth in depths
}
GOAL = 0.9


@dataclass(frozen=True)
class Whole:
    """A file as one range."""

    shard: str
    offset: int
    nbytes: int


def main() -> int:
    """Compare; 0 if every reader that runs here reaches the goal, 1 if not, 77 without fio."""
    options = _options()
    if fio.missing():
        return fio.SKIPPED
    with scratch_folder(options.folder) as folder, ExitStack() as stack:
        path = folder / SHARD
        fio.write_file(path, options.layer_mib * MIB)
        readers = _readers(path, TUNED | OURS if options.tune else OURS, stack)
        contestants = _contestants(path, readers, options.layer_mib * MIB)
        rows = pd.DataFrame(_turns(contestants, options.repetitions))
        mode = readers["threads"].mode
    table = _compare(rows)
    print(_markdown(table) if options.markdown else table.to_string(index=False, float_format="{:.3f}".format))
    ours = table[table["tool"].isin(OURS) & ~table["fio"]]
    load = reports.load_per_core()
    print(f"mode {mode}; goal: ratio ≥ {GOAL}; load a core at the end {load:.1f}")
    settings = {"layer_mib": options.layer_mib, "repetitions": options.repetitions}
    report = {"mode": mode, "load_per_core": load, "settings": settings}
    reports.save("storage_read", report | {"rows": table.to_dict("records"), "raw": rows.to_dict("records")})
    return int(ours["ratio"].min() < GOAL)


def _readers(path: Path, wanted: dict[str, tuple[str, dict]], stack: ExitStack) -> dict[str, Reader]:
    """The readers that this machine can run; what it cannot is said."""
    readers, files = {}, {SHARD: StoredFile.of(path)}
    for label, (name, options) in wanted.items():
        try:
            readers[label] = stack.enter_context(READERS[name](files, **options))
        except UserError as error:
            print(f"left out: {error}")
    return readers


def _contestants(path: Path, readers: dict[str, Reader], nbytes: int) -> dict[tuple[bool, str], Callable[[], float]]:
    """(Whether it is fio, label) -> a function that reads the file once and returns GB/s."""
    target = aligned_buffer(nbytes)

    def ours(reader: Reader) -> float:
        began = time.perf_counter()
        reader.read(in_line([Whole(SHARD, 0, nbytes)]), target)
        return nbytes / (time.perf_counter() - began) / 1e9

    def rival(engine: str, block_mib: int, threads: int, depth: int) -> float:
        share = nbytes // threads
        words = {"rw": "read", "ioengine": engine, "bs": block_mib * MIB, "iodepth": depth, "numjobs": threads}
        return read_gb_s(path, mode, words | {"size": share, "offset_increment": share})

    mode = readers["threads"].mode
    contestants = {(True, label): lambda setting=setting: rival(*setting) for label, setting in RIVALS.items()}
    return contestants | {(False, label): lambda reader=reader: ours(reader) for label, reader in readers.items()}


def _turns(contestants: dict[tuple[bool, str], Callable[[], float]], repetitions: int) -> list[dict]:
    """Each contestant once a turn, another one first each time."""
    rows = []
    for repetition in range(repetitions):
        first = repetition % len(contestants)
        for is_fio, label in [*contestants][first:] + [*contestants][:first]:
            time.sleep(fio.REST_S)
            gb_s = contestants[is_fio, label]()
            rows.append({"fio": is_fio, "tool": label, "repetition": repetition, "gb_s": gb_s})
    return rows


def _compare(rows: pd.DataFrame) -> pd.DataFrame:
    """Each one's median and best rate, and median and quartiles of its ratio to fio's best setting, turn by turn."""
    turns = rows.pivot_table(index=["fio", "tool"], columns="repetition", values="gb_s", sort=False)
    best = turns.loc[True].median(axis=1).idxmax()
    ratios = turns / turns.loc[(True, best)]
    table = pd.DataFrame({"gb_s": turns.median(axis=1), "highest_gb_s": turns.max(axis=1)})
    table["ratio"], table["low"] = ratios.median(axis=1), ratios.quantile(0.25, axis=1)
    table["high"] = ratios.quantile(0.75, axis=1)
    return table.reset_index()


def _markdown(table: pd.DataFrame) -> str:
    head = "| | GB/s, median | highest | of fio's best | quartiles |\n| --- | ---: | ---: | ---: | ---: |"
    line = "| {} {} | {:.2f} | {:.2f} | {:.2f} | {:.2f} to {:.2f} |"
    columns = ("tool", "gb_s", "highest_gb_s", "ratio", "low", "high")
    names = table["fio"].map({True: "fio:", False: "ours:"})
    rows = zip(names, *(table[column] for column in columns), strict=True)
    return "\n".join([head, *(line.format(*row) for row in rows)])


def _options() -> argparse.Namespace:
    parser = reports.disk_parser(__doc__, repetitions=11)
    parser.add_argument("--layer-mib", type=int, default=384)
    parser.add_argument("--tune", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
