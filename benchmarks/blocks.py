"""Products with blocks of GGUF files, every type, beside the memory's rate, in one run: GB/s and shares.

    python benchmarks/blocks.py                                    # all types, 1 and 8 vectors
    python benchmarks/blocks.py --types Q4_K Q6_K --vectors 1 2 4 8 16 32

A run multiplies all matrices of a decoder layer once, of Qwen2.5-1.5B's and of Llama 2 7B's shapes, as often as
fills more than the caches. Contestants take turns; minima are compared. Bytes are those of the blocks; the limit is
what all threads together read (`torch.sum` of as many bytes). `core` is what one core multiplies out of the second
cache, in its own time, so that other processes hardly disturb it. Writes results/benchmarks/blocks.json.
"""

import argparse
import math
import time

import numpy as np
import reports
import torch

from toolkit.formats.ggml import TYPES
from toolkit.formats.twins import random_blocks
from toolkit.kernels import blocks
from toolkit.kernels.blocks import PLAIN, tensors

SHAPES = {  # rows and columns of a layer's linears
    "qwen2.5-1.5b": [(1536, 1536), (256, 1536), (256, 1536), (1536, 1536), (8960, 1536), (8960, 1536), (1536, 8960)],
    "llama-2-7b": [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)],
}
COLD_BYTES = 128 << 20  # more than caches hold
READ, OURS = "read", "auto"
CACHED_BYTES, COLUMNS = 400_000, 4096
PAUSE_S = 0.002  # OpenMP's threads spin for a while after their work


def contestants(kind: str, shapes: list[tuple[int, int]], vectors: list[int]) -> tuple[dict, int]:
    """The runs, by way and number of vectors, and the bytes of blocks that each reads."""
    layer = [random_blocks(kind, *shape, seed) for seed, shape in enumerate(shapes)]
    copies = math.ceil(COLD_BYTES / sum(matrix.nbytes for matrix in layer))
    matrices = layer + [type(each)(each.shape, each.data.clone()) for _ in range(copies - 1) for each in layer]
    nbytes = sum(matrix.nbytes for matrix in matrices)
    data = torch.ones(nbytes // 8, dtype=torch.int64)
    found = {(READ, 1): data.sum}
    ways = [way for way in (blocks.backends(kind).available() if kind not in PLAIN else [OURS]) if way != "gguf"]
    for way in ways:
        for number in vectors:
            given = {columns: torch.randn(number, columns) for _, columns in shapes}

            def run(way=way, given=given):
                for matrix in matrices:
                    tensors.matvec(kind, matrix.data, given[matrix.shape[1]], backend=way)

            found[way, number] = run
    return found, nbytes


def core_gb_s(kind: str, way: str, number: int, repetitions: int) -> float:
    """Bytes that one core multiplies where its second cache holds the blocks, by the time that it works."""
    matrix = random_blocks(kind, CACHED_BYTES // TYPES[kind].layout.row_bytes(COLUMNS), COLUMNS)
    x = np.random.default_rng(0).standard_normal((number, COLUMNS), np.float32)
    out = np.empty((number, matrix.shape[0]), np.float32)
    product = blocks.backends(kind).choose(way).product
    made = product(kind, matrix.data.numpy(), x, out, lambda rounding, given, make: make(given))
    threads, best = torch.get_num_threads(), float("inf")
    torch.set_num_threads(1)
    for task in made.before:
        task()
    for _ in range(1 + repetitions):
        start = time.thread_time()
        made.task()
        best = min(best, time.thread_time() - start)
    torch.set_num_threads(threads)
    return matrix.nbytes / best / 1e9


def measure(kind: str, model: str, options: argparse.Namespace) -> list[dict]:
    """A row for each way and number of vectors."""
    runs, nbytes = contestants(kind, SHAPES[model], options.vectors)
    best = reports.minima(runs, options.repetitions, PAUSE_S)
    return [
        {
            "type": kind,
            "shapes": model,
            "way": way,
            "vectors": number,
            "gb_s": nbytes / seconds / 1e9,
            "share_of_read": best[READ, 1] / seconds,
            "core_gb_s": None
            if way == READ or kind in PLAIN
            else core_gb_s(kind, way, number, 10 * options.repetitions),
        }
        for (way, number), seconds in best.items()
    ]


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", default=[*TYPES], choices=[*TYPES], metavar="TYPE")
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--vectors", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    rows = []
    for kind in options.types:
        for model in options.shapes:
            for row in measure(kind, model, options):
                rows.append(row)
                print(
                    f"{kind:8} {model:13} {row['way']:7} {row['vectors']:2} vectors {row['gb_s']:6.1f} GB/s, "
                    f"{row['share_of_read']:.2f} of reads; core {row['core_gb_s'] or 0:6.1f} GB/s"
                )
    print(f"{torch.get_num_threads()} threads; load a core {reports.load_per_core():.1f}")
    settings = vars(options) | {"threads": torch.get_num_threads(), "load_per_core": reports.load_per_core()}
    reports.save("blocks", {"settings": settings, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
