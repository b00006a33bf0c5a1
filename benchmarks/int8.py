"""The int8 product beside what torch offers and beside the memory's rate, in one run: times, shares, ratios.

    python benchmarks/int8.py --rows 9216 --columns 9216

Contestants take turns; minima are compared. The limit is what both threads together read (`torch.sum` of as many
bytes). Goal: 0.8 of it. torch has no public product of int8 weights with an fp32 vector; the nearest ones are shown.
Writes results/benchmarks/int8.json.
"""

import argparse

import reports
import torch

from toolkit.kernels import dense

GOAL = 0.8
ROWS_AT_ONCE = 64
READ, OURS = "read", "ours"
PAUSE_S = 0.002  # OpenMP's threads spin for a while after their work


def contestants(weight: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor) -> dict:
    """The runs, by name."""
    data, out = torch.ones(weight.nbytes // 8, dtype=torch.int64), torch.zeros(len(weight))
    bf16, x_bf16, scales = weight.bfloat16(), x.bfloat16(), torch.ones(len(weight), dtype=torch.bfloat16)
    found = {READ: data.sum, OURS: lambda: dense.matvec(weight, x, out)}
    found |= {
        f"ours, {name}": lambda name=name: dense.matvec(weight, x, out, name) for name in dense.BACKENDS.available()
    }
    found |= {
        f"ours, {len(vectors)} vectors": lambda: dense.matvec(weight, vectors),
        "torch, 64 rows widened at a time": lambda: torch.cat(
            [part.float() @ x for part in weight.split(ROWS_AT_ONCE)]
        ),
        "torch, dense bfloat16": lambda: bf16 @ x_bf16,
    }
    if hasattr(torch, "_weight_int8pack_mm"):  # private, and its sums are rounded to bfloat16
        found["torch, _weight_int8pack_mm"] = lambda: torch._weight_int8pack_mm(x_bf16[None], weight, scales)
    return found


def main() -> int:
    """Measure; 0 if the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 9216), ("columns", 9216), ("batch", 16), ("repetitions", 25)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (options.rows, options.columns), dtype=torch.int8, generator=generator)
    vectors = torch.randn(options.batch, options.columns, generator=generator)
    runs = contestants(weight, vectors[0].contiguous(), vectors)
    best = reports.minima(runs, options.repetitions, PAUSE_S)
    rows = [
        {
            "contestant": name,
            "minimum_ms": seconds * 1e3,
            "int8_gb_s": weight.nbytes / seconds / 1e9,
            "share_of_read": best[READ] / seconds,
            "over_ours": seconds / best[OURS],
        }
        for name, seconds in best.items()
    ]
    for row in rows:
        print(
            f"{row['contestant']:34} {row['minimum_ms']:9.2f} ms {row['int8_gb_s']:6.1f} GB/s "
            f"{row['share_of_read']:.2f} of reads {row['over_ours']:6.2f} x ours"
        )
    share = best[READ] / best[OURS]
    print(f"share of reads {share:.2f}, goal {GOAL}; load a core {reports.load_per_core():.1f}")
    settings = vars(options) | {"threads": torch.get_num_threads(), "load_per_core": reports.load_per_core()}
    reports.save("int8", {"settings": settings, "share_of_read": share, "goal": GOAL, "rows": rows})
    return int(share < GOAL)


if __name__ == "__main__":
    raise SystemExit(main())
