"""Judges the CUDA kernels on this machine's GPU, in eight minutes at most: are they right, and how fast are they?

    python benchmarks/gpu.py                  # from a bare checkout: torch, numba-cuda and transformers are enough
    python benchmarks/gpu.py --long           # more shapes, more vectors; an hour
    python benchmarks/gpu.py --only spqr      # operations whose name contains a word
    python benchmarks/gpu.py --simulate       # without a GPU: small matrices in Numba's simulator; nothing is timed

1. Every kernel is set against its oracle, a product of dense weights in fp64, at odd shapes.
2. A random twin of SmolLM2-135M, packed in three ways, writes text as `sparse-offload run --device cuda` does: its
   logits and tokens are compared with those of the dense twin on the GPU.
3. Kernels are timed beside their rivals (cuBLAS, cuSPARSE, torch) and beside their byte limit: the bytes that each must
   at least read and write, at the rate of a copy on the device. Contestants take turns. Before each run, reading two
   gigabytes flushes the L2 cache and keeps the GPU busy while the host launches what is timed. Medians are compared.

The table comes row by row, and results/benchmarks/gpu.json with it, so a run that is stopped leaves both. The checks
run in a process of their own. A kernel that fails is a row; after one that breaks the GPU, or that takes longer than
`--patience`, the next check begins in a new process. The last line names the checks that the budget did not reach.

Exit status: 0 if all results are right, 1 if one is wrong or failed, 77 without a GPU.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NO_GPU = 77
FOLDER = Path(__file__).resolve().parent
WORKER = [sys.executable, str(FOLDER / "gpu_checks.py")]
ODD, NEURONS = [(17, 40), (33, 4100)], [(33, 576)]
LARGE, LARGE_NEURONS = [(4096, 4096), (28_672, 8192)], (14_336, 4096)  # of neurons: rows, hidden
ALL, ONE = (1, 3, 16), (1,)  # vectors at once
HEADER = (
    "| operation | shape | result | µs | GB/s | of the limit | rivals |\n| --- | --- | --- | ---: | ---: | ---: | --- |"
)


def groups(long: bool, simulated: bool) -> list[dict]:
    """The checks, in their order: all kernels, then a model, then times."""
    if simulated:
        tiny = {"bitmap": [(3, 20)], "spqr": [(3, 20)], "neurons": [(3, 64)]}
        return [_group(kind, shapes, (1, 3)) for kind, shapes in tiny.items()] + [_group("text", [])]
    found = [_group("bitmap", ODD), _group("spqr", ODD), _group("neurons", NEURONS), _group("text", [])]
    batches = ALL if long else ONE
    for shape in LARGE:
        found += [_group(kind, [shape], batches, timed=True) for kind in ("bitmap", "spqr")]
    found += [_group("neurons", [LARGE_NEURONS], batches, timed=True)]
    if long:
        found += [_group(kind, [(1, 1), (300, 5000), (3000, 1024)], range(1, 17)) for kind in ("bitmap", "spqr")]
        found += [_group("neurons", [(1, 64), (300, 1024)], range(1, 17))]
    return found


def _group(kind: str, shapes: list, batches=ALL, timed: bool = False) -> dict:
    return {"kind": kind, "shapes": shapes, "batches": list(batches), "timed": timed}


def title(group: dict) -> str:
    """A group for people."""
    shapes = ", ".join("x".join(map(str, shape)) for shape in group["shapes"])
    return f"{group['kind']}{f' {shapes}' * bool(shapes)}{', timed' * group['timed']}"


def told(command: list[str], given: str, patience_s: float, until: float) -> Iterator[dict]:
    """The lines of a process as they come, and `{"ended": reason}` unless it ended well.

    It is killed if it is silent for `patience_s`, and at the instant `until` of the monotonic clock.
    """
    lines: queue.Queue = queue.Queue()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        with process:
            threading.Thread(target=_listen, args=(process, lines), daemon=True).start()
            process.stdin.write(given)
            process.stdin.close()
            try:
                left = min(patience_s, until - time.monotonic())
                while line := lines.get(timeout=max(0.0, left)):
                    yield json.loads(line)
                    left = min(patience_s, until - time.monotonic())
                if status := process.wait():
                    errors.seek(0)
                    yield {"ended": f"status {status}: {(errors.read().strip().splitlines() or ['nothing said'])[-1]}"}
            except queue.Empty:
                yield {"ended": "the budget" if time.monotonic() >= until else f"nothing for {patience_s:.0f} s"}
            finally:
                process.kill()


def _listen(process: subprocess.Popen, lines: queue.Queue) -> None:
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def checked(every: list[dict], options: argparse.Namespace, until: float) -> Iterator[dict]:
    """The rows of all checks, from as many processes as it takes; at last what was left out, if anything was."""
    number, place, given = 0, 0, json.dumps(every)  # of the next group and check
    settings = ["--only", options.only, "--repetitions", str(options.repetitions)]
    while number < len(every):
        under_way, began, ended = None, False, ""
        for line in told([*WORKER, str(number), str(place), *settings], given, options.patience, until):
            if "begins" in line:
                under_way, began, (number, place) = line, True, line.pop("begins")
            elif "ended" in line:
                ended = line["ended"]
            else:
                yield line
            if "right" in line:
                under_way, place = None, place + 1
        if not ended:
            return
        if time.monotonic() >= until:
            yield {"left_out": [f"the rest of {title(every[number])}", *map(title, every[number + 1 :])]}
            return
        if under_way:
            yield {**under_way, "right": False, "failed": ended}
            place += 1
        elif not began:
            yield {"operation": "all", "shape": title(every[number]), "right": False, "failed": ended}
            number, place = number + 1, 0


def simulated(every: list[dict], options: argparse.Namespace) -> list[dict]:
    """The rows of all checks in the simulator, in this process; each is printed as it comes."""
    sys.path.insert(0, str(FOLDER))
    import gpu_checks

    rows: list[dict] = []

    def tell(line: dict) -> None:
        if "right" in line:
            rows.append(line)
            print(row_of(line), flush=True)

    gpu_checks.run(every, (0, 0), options, tell)
    return rows


def row_of(row: dict) -> str:
    """A row of the table."""
    result = (
        f"**FAILED**: {row['failed']}"
        if "failed" in row
        else "right"
        if row["right"]
        else f"**WRONG** by {row['error']:.2g}"
    )
    cells = [row["operation"], row["shape"], result, "", "", "", ""]
    if "seconds" in row:
        cells[3:6] = f"{row['seconds'] * 1e6:.1f}", f"{row['gb_s']:.0f}", f"{row['share_of_limit']:.2f}"
        cells[6] = "; ".join(f"{times:.2f} × {name}" for name, times in row["times"].items())
    if "tokens_s" in row:
        cells[6] = f"{row['tokens_s']:.1f} tokens/s"
    if "same_tokens" in row:
        cells[2] += f"; {row['same_tokens']:.0%} of the tokens agree"
    return f"| {' | '.join(cells)} |"


def save(report: dict) -> None:
    """Write results/benchmarks/gpu.json whole, so that it can be read at any moment."""
    target = Path(os.environ.get("TOOLKIT_RESULTS_DIR") or FOLDER.parent / "results") / "benchmarks" / "gpu.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_suffix(".tmp")
    made.write_text(json.dumps(report, indent=1) + "\n")
    made.replace(target)


def machine() -> dict[str, str]:
    """The GPU and the packages, as they call themselves; without a GPU, the packages alone."""
    import torch

    found = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    found |= {"cuda": str(torch.version.cuda), "python": sys.version.split()[0]}
    for name in ("torch", "numba", "numba-cuda", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def main() -> int:
    """Check, time, write; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="check small matrices in Numba's simulator")
    parser.add_argument("--only", default="", help="operations whose name contains this word")
    parser.add_argument("--long", action="store_true", help="more shapes and vectors, without a budget")
    parser.add_argument("--budget", type=float, default=450, help="seconds for all (default: 450)")
    parser.add_argument("--patience", type=float, default=120, help="seconds for one check (default: 120)")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    begun, found = time.monotonic(), machine()
    every = groups(options.long, options.simulate)
    if options.only and "text" not in options.only:  # transformers takes seconds to import
        every = [group for group in every if group["kind"] != "text"]
    if not options.simulate and "gpu" not in found:
        print("skipped: torch sees no GPU; --simulate checks small matrices without one")
        return NO_GPU
    report = {"machine": found, "simulated": options.simulate, "rows": [], "left_out": []}
    print(", ".join(f"{name} {value}" for name, value in found.items()), HEADER, sep="\n", flush=True)
    if options.simulate:
        report["rows"] = simulated(every, options)
    for line in () if options.simulate else checked(every, options, begun + (3600 if options.long else options.budget)):
        if "right" in line:
            report["rows"].append(line)
            print(row_of(line), flush=True)
        else:
            report |= line
        save(report)
    save(report)
    wrong = sum(not row["right"] for row in report["rows"])
    print(f"\n{len(report['rows'])} checks, {wrong} wrong, {time.monotonic() - begun:.0f} s")
    if "copy_gb_s" in report:
        print(f"The limit is a copy on the device, {report['copy_gb_s']:.0f} GB/s.")
    if report["left_out"]:
        print(f"The budget ended before: {'; '.join(report['left_out'])}.")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
