"""The FFN of some neurons beside torch's ways and beside the memory's rate, in one run: times, shares, ratios.

    python benchmarks/neurons.py                                              # OPT-6.7B: 24 % of 16384 neurons
    python benchmarks/neurons.py --hidden 4096 --neurons 11008 --gated        # Llama 2 7B
    python benchmarks/neurons.py --hidden 576 --neurons 1536 --share 0.5 --gated

Contestants take turns; minima are compared. The limit is what all threads together read (`torch.sum` of the same
bundles). Goals: 0.8 of it, and 3 times torch's indexing of the matrices followed by its products. Every neuron is
active, so that all bytes are needed. Each run takes the next of several equal stores, more than the caches hold, so
that bytes come from memory; with `--cached` there is one store. Writes results/benchmarks/neurons.json.
"""

import argparse
from collections.abc import Callable
from itertools import cycle

import reports
import torch
from torch.nn import functional

from toolkit.kernels import neurons

GOALS = {"share_of_read": 0.8, "times_index": 3.0}
READ, INDEX, OURS = "read", "torch, index then multiply", "ours"
COLD_BYTES = 600 << 20  # of all stores together
PAUSE_S = 0.002  # OpenMP's threads spin for a while after their work
MOST_VECTORS = 16
BIAS = 100.0  # no ReLU stops such a neuron


def on_each(stores: list[torch.Tensor], run: Callable) -> Callable:
    """Run on the next store at each call."""
    following = cycle(stores)
    return lambda: run(next(following))


def contestants(options: argparse.Namespace) -> tuple[dict, int]:
    """The runs, by name, and the bytes of the bundles."""
    generator, hidden, parts = torch.Generator().manual_seed(0), options.hidden, 3 if options.gated else 2
    dtype, rows = getattr(torch, options.dtype), round(options.share * options.neurons)
    matrices = [
        (torch.randn(options.neurons, hidden, generator=generator) * hidden**-0.5).to(dtype) for _ in range(parts)
    ]
    chosen = torch.randperm(options.neurons, generator=generator)[:rows]
    store = torch.cat([matrix[chosen] for matrix in matrices], dim=1)  # rows of a store are in any order
    x = torch.randn(hidden, generator=generator)
    x_typed, activation = x.to(dtype), "silu" if options.gated else "relu"
    bias = None if options.gated else torch.full((rows,), BIAS)
    act, typed_bias = getattr(functional, activation), None if bias is None else bias.to(dtype)
    out, vectors = torch.empty(hidden), torch.randn(MOST_VECTORS, hidden, generator=generator)
    stores = [store] + [store.clone() for _ in range(0 if options.cached else COLD_BYTES // store.nbytes)]

    def multiply(*given: torch.Tensor) -> torch.Tensor:
        if options.gated:
            return (act(given[0] @ x_typed) * (given[1] @ x_typed)) @ given[2]
        return act(torch.addmv(typed_bias, given[0], x_typed)) @ given[1]

    def ours(vectors: torch.Tensor, bias: torch.Tensor | None, **chosen: object) -> Callable:
        return on_each(stores, lambda store: neurons.ffn(store, vectors, activation, bias, **chosen))

    found = {
        READ: on_each(stores, lambda store: store.view(torch.int64).sum()),
        INDEX: lambda: multiply(*(matrix[chosen] for matrix in matrices)),
        "torch, rows of the store": on_each(stores, lambda store: multiply(*store.split(hidden, dim=1))),
        OURS: ours(x, bias, out=out),
    }
    found |= {f"ours, {name}": ours(x, bias, out=out, backend=name) for name in neurons.BACKENDS.available()}
    found |= {f"ours, {batch} vectors": ours(vectors[:batch], bias) for batch in (options.batch, MOST_VECTORS)}
    if not options.gated:
        stopped = torch.where(torch.arange(rows) % 10 == 0, BIAS, -BIAS)
        found["ours, 9 of 10 stopped by the ReLU"] = ours(x, stopped, out=out)
    return found, store.nbytes


def main() -> int:
    """Measure; 0 if the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden", 4096), ("neurons", 16384), ("batch", 5), ("repetitions", 25)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share", type=float, default=0.24, help="of the neurons that are in memory and used")
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--cached", action="store_true", help="one store, which stays in the caches if it fits")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="float16")
    options = parser.parse_args()
    runs, nbytes = contestants(options)
    best = reports.minima(runs, options.repetitions, PAUSE_S)
    rows = [
        {
            "contestant": name,
            "minimum_ms": seconds * 1e3,
            "gb_s": nbytes / seconds / 1e9,
            "share_of_read": best[READ] / seconds,
            "times_index": best[INDEX] / seconds,
        }
        for name, seconds in best.items()
    ]
    print(f"{nbytes / 1e6:.1f} MB of bundles, {torch.get_num_threads()} threads")
    for row in rows:
        print(
            f"{row['contestant']:34} {row['minimum_ms']:9.3f} ms {row['gb_s']:6.1f} GB/s "
            f"{row['share_of_read']:.2f} of reads {row['times_index']:6.2f} x {INDEX}"
        )
    ours = next(row for row in rows if row["contestant"] == OURS)
    met = {name: ours[name] >= least for name, least in GOALS.items()}
    print(f"goals {GOALS}: met {met}; load a core {reports.load_per_core():.1f}")
    settings = vars(options) | {"threads": torch.get_num_threads(), "load_per_core": reports.load_per_core()}
    reports.save("neurons", {"settings": settings, "goals": GOALS, "met": met, "rows": rows})
    return int(not all(met.values()))


if __name__ == "__main__":
    raise SystemExit(main())
