"""The rates of this machine, measured: `python -m toolkit.machines.probe [--fresh]`.

    machine = probe()            # a hardware profile like the papers' ones, every number measured here
    table = measurements()       # the measurements behind it: a row for each repetition

It takes about 20 seconds, once: the measurements are kept under `data/cache/probe/`, by machine, disk and settings.
Measure while nothing else runs, since other work changes the numbers.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
import psutil

from toolkit import memory_limits, paths, sources
from toolkit.cache import cached_table
from toolkit.errors import UserError, run_command
from toolkit.files import make_folder
from toolkit.machines import disk, memory
from toolkit.machines.fit import non_negative
from toolkit.machines.machine import GB, THIS_MACHINE, Links, Memory, Profile, Source, Storage
from toolkit.machines.provenance import cpu_name

KIB, MIB = 1 << 10, 1 << 20
COLUMNS = ["part", "quantity", "dtype", "pattern", "chunk_bytes", "threads", "mode", "repetition", "value", "unit"]
CPU_DTYPES, GPU_DTYPES = ("fp32", "bf16"), ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class ProbeSettings:
    """Sizes to measure. `chunk_bytes` × `threads` random reads, sequential ones at the largest chunk, `read_s` each.

    The first of the repetitions is kept in the table and left out of the profile. Without threads no disk is measured,
    which takes most of the time.
    """

    file_bytes: int = 512 * MIB
    chunk_bytes: tuple[int, ...] = tuple(size * KIB for size in (4, 8, 16, 32, 64, 128, 256, 1024))
    threads: tuple[int, ...] = (1, 4, 16, 32)
    read_s: float = 0.1
    memory_bytes: int = 512 * MIB
    repetitions: int = 3


QUICK = ProbeSettings()


def settings_for(dram_bytes: int) -> ProbeSettings:
    """`QUICK`, with buffers of an eighth of the memory at most, so that a small container can be measured."""
    fitting = 1 << (dram_bytes // 8).bit_length() - 1
    return replace(QUICK, memory_bytes=min(QUICK.memory_bytes, fitting))


def probe(fresh: bool = False, settings: ProbeSettings | None = None, folder: Path | None = None) -> Profile:
    """The profile of this machine; `measurements` has the arguments and the errors.

    Disk: a cell is the median of its repetitions; the bandwidth is the best cell's, `latency_s` and `request_s` are
    fitted to all random cells. Memory, copies and compute: the best repetition.
    """
    table, machine = measurements(fresh, settings, folder), describe(folder)
    kept = table[table["repetition"] > 0]
    parts, origins = {}, {}
    for part, make in {"storage": _storage, "dram": _memory, "device": _memory, "links": _links}.items():
        if part == "links" or part in set(kept["part"]):
            parts[part], found = make(part, kept, machine)
            origins |= {f"{part}.{name}": Source("measured", text) for name, text in found.items()}
    title = ", ".join(str(machine[name]) for name in ("cpu", "gpu") if machine[name])
    return Profile(THIS_MACHINE, title, None, **parts, sources=MappingProxyType(origins))


def measurements(
    fresh: bool = False, settings: ProbeSettings | None = None, folder: Path | None = None
) -> pd.DataFrame:
    """Every repetition of everything measured, from the cache unless `fresh`.

    Args:
        fresh: measure again and replace what the cache holds; until it is done the old measurements stay.
        settings: what to measure; `settings_for` this machine's memory if None.
        folder: where the test file goes, so which disk is measured; `data/cache/` if None. The file is gone afterwards,
            whatever happens.

    Columns: part (storage, dram, device, links), quantity (read, copy, gemm, or a link's name), dtype, pattern (random,
    sequential), chunk_bytes, threads, mode (direct, or buffered if the file system refuses O_DIRECT), repetition (0 is
    the first), value, unit. Raises `UserError` for a folder that does not exist, or too little memory or space; then,
    and when interrupted, nothing is kept.
    """
    machine = describe(folder)
    settings = settings or settings_for(int(machine["dram_bytes"]))
    key = {"machine": machine, "settings": asdict(settings)}
    code = [*sources.dependencies("toolkit.machines.disk", "toolkit.machines.memory"), Path(__file__).resolve()]
    return cached_table("probe", key, code, lambda: _measure(settings, folder, machine), fresh)


def describe(folder: Path | None = None) -> dict[str, object]:
    """The machine as the system names it: cpu, gpu, dram_bytes, device_bytes, filesystem, disk, disk_bytes."""
    import torch

    target = _existing(folder)
    mounts = [entry for entry in psutil.disk_partitions(all=True) if target.is_relative_to(entry.mountpoint)]
    mount = max(mounts, key=lambda entry: len(entry.mountpoint), default=None)
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "gpu": gpu and gpu.name,
        "dram_bytes": memory_limits.total_bytes(),
        "device_bytes": gpu and gpu.total_memory,
        "filesystem": mount and mount.fstype,
        "disk": mount and mount.device,
        "disk_bytes": shutil.disk_usage(target).total,
    }


def _existing(folder: Path | None) -> Path:
    if folder is None:
        make_folder(paths.cache_dir())
    elif not Path(folder).is_dir():
        raise UserError(f"no folder {folder} for the test file: name one that exists, on the disk to be measured")
    return Path(folder or paths.cache_dir()).resolve()


def _measure(settings: ProbeSettings, folder: Path | None, machine: dict) -> pd.DataFrame:
    if settings.memory_bytes > (free := memory_limits.free_bytes()) // 3:
        raise UserError(f"memory_bytes={settings.memory_bytes}: expected at most a third of the {free} that are free")
    rows = []
    if settings.threads:
        with disk.scratch_file(_existing(folder), settings.file_bytes) as file:
            rows += _disk_rows(file, settings)
    rows += _memory_rows("dram", "cpu", CPU_DTYPES, settings)
    if machine["gpu"]:
        rows += _memory_rows("device", "cuda", GPU_DTYPES, settings)
        rows += _link_rows(settings)
    return pd.DataFrame(rows, columns=COLUMNS)


def _disk_rows(file: disk.OpenFile, settings: ProbeSettings) -> Iterator[dict]:
    cells = [("random", chunk, threads) for chunk in settings.chunk_bytes for threads in settings.threads]
    cells += [("sequential", max(settings.chunk_bytes), threads) for threads in settings.threads]
    for repetition in range(settings.repetitions):  # outermost: a slow spell of the disk hits each cell once
        for pattern, chunk, threads in cells:
            reading = disk.read(file, pattern, chunk, threads, settings.read_s, seed=repetition)
            cell = {"part": "storage", "quantity": "read", "pattern": pattern, "chunk_bytes": chunk, "threads": threads}
            yield cell | {"mode": file.mode, "repetition": repetition, "value": reading.gb_s, "unit": "GB/s"}


def _memory_rows(part: str, device: str, dtypes: tuple[str, ...], settings: ProbeSettings) -> list[dict]:
    size, count = settings.memory_bytes, settings.repetitions
    rows = _rows(part, "read", "GB/s", memory.read_gb_s(size, count, device))
    rows += _rows(part, "copy", "GB/s", memory.transfer_gb_s(size, count, device, device))
    for dtype in dtypes:
        rows += _rows(part, "gemm", "TFLOP/s", memory.gemm_tflop_s(dtype, count, device), dtype=dtype)
    return rows


def _link_rows(settings: ProbeSettings) -> list[dict]:
    size, count = settings.memory_bytes, settings.repetitions
    down = memory.transfer_gb_s(size, count, "cpu", "cuda")
    up = memory.transfer_gb_s(size, count, "cuda", "cpu")
    return _rows("links", "dram_to_device", "GB/s", down) + _rows("links", "device_to_dram", "GB/s", up)


def _rows(part: str, quantity: str, unit: str, values: list[float], dtype: str | None = None) -> list[dict]:
    import torch

    shared = {"part": part, "quantity": quantity, "unit": unit, "dtype": dtype}
    threads = torch.get_num_threads() if part == "dram" else None
    return [shared | {"threads": threads, "repetition": number, "value": value} for number, value in enumerate(values)]


def _storage(part: str, table: pd.DataFrame, machine: dict) -> tuple[Storage, dict[str, str]]:
    rows = table[table["part"] == part]
    cells = rows.groupby(["pattern", "chunk_bytes", "threads"], as_index=False)["value"].median()
    best = cells.loc[cells["value"].idxmax()]
    name = f"{machine['disk']} ({machine['filesystem']})"
    plain = Storage(name, machine["disk_bytes"], best["value"])
    fitted, error = fit_latency(plain, cells[cells["pattern"] == "random"])
    fit = f"fitted to the random reads of every chunk size and thread count, median error {error:.0%}"
    return fitted, {
        "capacity_bytes": "size of the file system",
        "bandwidth_gb_s": f"{rows['mode'].iloc[0]} {best['pattern']} reads, {best['chunk_bytes'] // KIB:.0f} KiB × "
        f"{best['threads']:.0f} threads, median of {table['repetition'].max()} repetitions",
        "latency_s": fit,
        "request_s": fit,
    }


def fit_latency(storage: Storage, cells: pd.DataFrame) -> tuple[Storage, float]:
    """`storage` with the `latency_s` and `request_s` that fit random reads best, and the median relative error.

    cells: columns chunk_bytes, threads, value (GB/s). A read's time less its transfer, threads · chunk · (1 / value
    - 1 / bandwidth), is linear in the two: latency + threads · request. The fit minimises relative errors.
    """
    moved = cells["threads"] * cells["chunk_bytes"] / GB
    read_s = moved / cells["value"]
    waited = (read_s - moved / storage.bandwidth_gb_s) / read_s
    terms = np.stack([1 / read_s, cells["threads"] / read_s], axis=1)
    latency_s, request_s = non_negative(terms, waited.to_numpy())
    fitted = replace(storage, latency_s=latency_s, request_s=request_s)
    modelled = [fitted.read_gb_s(row.chunk_bytes, row.threads) for row in cells.itertuples()]
    return fitted, float(np.median(np.abs(modelled / cells["value"] - 1)))


def _memory(part: str, table: pd.DataFrame, machine: dict) -> tuple[Memory, dict[str, str]]:
    rows = table[table["part"] == part]
    best = rows.groupby(["quantity", rows["dtype"].fillna("")])["value"].max()
    rates = best["gemm"].to_dict()
    name, size = ("cpu", "dram_bytes") if part == "dram" else ("gpu", "device_bytes")
    threads = rows["threads"].iloc[0]
    how = f"{threads:.0f} threads, " if part == "dram" else ""
    texts = {
        "capacity_bytes": "as the system reports it, within the limit of a container or a batch job",
        "bandwidth_gb_s": f"sum over a buffer, {how}best repetition; a copy moves {best['copy', '']:.1f} GB/s each way",
    }
    texts |= {f"tflop_s.{dtype}": f"torch matrix product in {dtype}, {how}best repetition" for dtype in rates}
    return Memory(machine[name], machine[size], best["read", ""], MappingProxyType(rates)), texts


def _links(part: str, table: pd.DataFrame, machine: dict) -> tuple[Links, dict[str, str]]:
    links, texts = Links(), {}
    if "storage" in set(table["part"]):
        storage, origins = _storage("storage", table, machine)
        links, texts = Links(storage.bandwidth_gb_s), {"storage_to_dram_gb_s": origins["bandwidth_gb_s"]}
    best = table[table["part"] == part].groupby("quantity")["value"].max()
    if len(best):
        links = replace(links, dram_to_device_gb_s=best["dram_to_device"])
        text = f"copy from pinned memory, best repetition; {best['device_to_dram']:.1f} GB/s the other way"
        texts["dram_to_device_gb_s"] = text
    return links, texts


def main(arguments: list[str] | None = None) -> int:
    """Print this machine's profile; 0 if all is well, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.machines.probe", description="Measure this machine.")
    parser.add_argument("--fresh", action="store_true", help="measure again, whatever the cache holds")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the cache folder)")
    options = parser.parse_args(arguments)
    return run_command(lambda: _print(probe(options.fresh, folder=options.folder)))


def _print(machine: Profile) -> None:
    print(machine.title)
    print(machine.table()[["part", "quantity", "value", "source"]].to_string(index=False, float_format="{:.6g}".format))


if __name__ == "__main__":
    sys.exit(main())
