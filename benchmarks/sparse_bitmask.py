"""Decompressing `sparse-bitmask` weights: ours beside compressed-tensors', from the same four tensors, in one run.

    pip install --no-deps "compressed-tensors==0.14.0.1" loguru pydantic pydantic-core annotated-types typing-inspection
    python benchmarks/sparse_bitmask.py [--rows 9216] [--columns 9216] [--sparsity 0.5] [--dtype bfloat16]

First the two must agree: what each packs is the same bytes, and each decodes the other's to the same bits. Then they
take turns; minima are compared. Prints the table and the ratio, and writes results/benchmarks/sparse_bitmask.json.
Goal: a fifth of their time, both into new memory (whose page faults are most of what ours takes), and ours with the
check of every row that foreign data get. "Into place" is the kernel alone, writing into memory that is there.
"""

import argparse
import sys
import time
from collections.abc import Callable

import pandas as pd
import reports
import torch

from toolkit.formats.sparse_bitmask import SparseBitmask
from toolkit.kernels import bitmap
from toolkit.models.shapes import random_pruned

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
OURS, IN_PLACE, THEIRS, COPY = "ours", "ours, into place", "compressed-tensors", "dense copy"
GOAL = 5
PAUSE_S = 0.002  # OpenMP's threads spin for a while after their work, and would take a core from the next contestant


def main() -> int:
    """Compare; 0 if the goal is met, 1 if not, 77 without a compressed-tensors that has the layout."""
    options = _options()
    try:
        from compressed_tensors import __version__ as version
        from compressed_tensors.compressors.sparse_compressors.sparse_bitmask import BitmaskTensor
    except ImportError as error:
        print(f"skipped: no compressed-tensors of a version that has sparse-bitmask, 0.9 to 0.14 ({error})")
        return 77
    weight = random_pruned((options.rows, options.columns), options.sparsity, DTYPES[options.dtype])
    theirs = BitmaskTensor.from_dense(weight)
    packed = _agreed(weight, theirs)
    table = _measure(_contestants(weight, packed, theirs), options.repetitions)
    best = table.set_index("contestant")["minimum_ms"]
    ratio, in_place = best[THEIRS] / best[OURS], best[THEIRS] / best[IN_PLACE]
    load = reports.load_per_core()
    print(table.to_string(index=False, float_format="{:.2f}".format))
    print(f"compressed-tensors {version} takes {ratio:.1f} times as long (goal {GOAL}); in place {in_place:.1f}")
    print(f"{torch.get_num_threads()} threads; load a core {load:.1f}")
    circumstances = {"settings": vars(options), "threads": torch.get_num_threads(), "load_per_core": load}
    versions = {"compressed_tensors": version, "torch": torch.__version__}
    ratios = {"ratio": ratio, "ratio_in_place": in_place, "goal": GOAL}
    reports.save("sparse_bitmask", circumstances | versions | ratios | {"rows": table.to_dict("records")})
    return int(ratio < GOAL)


def _agreed(weight: torch.Tensor, theirs) -> SparseBitmask:
    """Our packing of the weight, after making sure that it is theirs, and that both decode to the weight."""
    ours = SparseBitmask.encode(weight)
    stored = {name.removeprefix("weight."): tensor for name, tensor in theirs.dict("weight").items()}
    for part, tensor in ours.tensors.items():
        assert _same_bits(tensor, stored[part]), f"{part} differs from what compressed-tensors writes"
    assert _same_bits(SparseBitmask.from_tensors(stored).decode(), weight), "ours decodes theirs to something else"
    assert _same_bits(type(theirs)(**ours.tensors).decompress(), weight), "theirs decodes ours to something else"
    return ours


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = a.dtype == b.dtype and a.shape == b.shape
    return whole and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _contestants(weight: torch.Tensor, packed: SparseBitmask, theirs) -> dict[str, Callable[[], object]]:
    stored, endor, out = packed.tensors, packed.to_endor(), weight.clone()
    return {
        OURS: lambda: SparseBitmask.from_tensors(stored).decode(),
        IN_PLACE: lambda: bitmap.decompress(endor, out),
        THEIRS: theirs.decompress,
        COPY: weight.clone,
    }


def _measure(contestants: dict[str, Callable[[], object]], repetitions: int) -> pd.DataFrame:
    spent = {name: [] for name in contestants}
    for _ in range(repetitions):
        for name, run in contestants.items():
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            run()
            spent[name].append((time.perf_counter() - start) * 1e3)
    times = pd.DataFrame(spent)
    summary = {"minimum_ms": times.min(), "median_ms": times.median()}
    return pd.DataFrame(summary).rename_axis("contestant").reset_index().assign(repetitions=repetitions)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=9216)
    parser.add_argument("--columns", type=int, default=9216)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
