"""The FFN of quantised neurons beside reads, bf16 bundles and torch's int8 product, in one run.

    python benchmarks/neuron_records.py                                   # an expert of Mixtral 8x7B, 4 bits
    python benchmarks/neuron_records.py --bits 2
    python benchmarks/neuron_records.py --hidden 2048 --neurons 1408      # DeepSeekMoE 16B

Contestants take turns; minima are compared. The limit is what all threads together read (`torch.sum` of the same
bytes). Goal: 0.6 of it. Each run takes the next of several equal stores, more than the caches hold. Every neuron is
active. Writes results/benchmarks/neuron_records.json.
"""

import argparse
from collections.abc import Callable
from itertools import cycle

import reports
import torch
from torch.nn import functional

from toolkit.kernels import neurons
from toolkit.kernels.neurons.records import HEAD_BYTES, SECTIONS, record_bytes, section_bytes

GOAL = 0.6
READ, OURS = "read", "ours"
COLD_BYTES = 400 << 20  # of all stores together
PAUSE_S = 0.002


def random_records(rows: int, hidden: int, bits: int) -> torch.Tensor:
    """Records of any codes, whose weights are about 1 / √hidden."""
    generator = torch.Generator().manual_seed(0)
    records = torch.randint(0, 256, (rows, record_bytes(hidden, bits)), dtype=torch.uint8, generator=generator)
    scale, levels, nbytes = 2 * hidden**-0.5 / (2**bits - 1), 2**bits - 1, section_bytes(hidden, bits)
    head = torch.tensor([scale / 500, scale, levels / 1000, levels / 2.5], dtype=torch.float16).view(torch.uint8)
    for section in range(SECTIONS):
        records[:, section * nbytes : section * nbytes + HEAD_BYTES] = head
    return records


def on_each(stores: list, run: Callable) -> Callable:
    """Run on the next store at each call."""
    following = cycle(stores)
    return lambda: run(next(following))


def contestants(options: argparse.Namespace) -> dict[str, tuple[Callable, int]]:
    """The runs and the bytes that each reads, by name."""
    rows, hidden, bits = options.neurons, options.hidden, options.bits
    store = random_records(rows, hidden, bits)
    stores = [store] + [store.clone() for _ in range(COLD_BYTES // store.nbytes)]
    x, out = torch.randn(hidden, generator=torch.Generator().manual_seed(0)), torch.empty(hidden)
    batch = torch.randn(4, hidden)

    def ours(vectors: torch.Tensor, **chosen: object) -> Callable:
        return on_each(stores, lambda store: neurons.ffn(store, vectors, "silu", bits=bits, **chosen))

    whole = store.nbytes
    found = {
        READ: (on_each(stores, lambda store: store.view(torch.int64).sum()), whole),
        OURS: (ours(x, out=out), whole),
    }
    found |= {
        f"ours, {name}": (ours(x, out=out, backend=name), whole) for name in neurons.RECORD_BACKENDS.available()[:-1]
    }
    found["ours, 4 vectors"] = ours(batch), whole
    bundles = (torch.randn(rows, 3 * hidden) * hidden**-0.5).bfloat16()
    found["bf16 bundles"] = (lambda: neurons.ffn(bundles, x, "silu", out=out)), bundles.nbytes
    given = [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in [(rows, hidden)] * 2 + [(hidden, rows)]]
    scales = [torch.ones(len(weight), dtype=torch.bfloat16) for weight in given]
    product = torch.ops.aten._weight_int8pack_mm

    def int8() -> torch.Tensor:
        first, second = (product(x[None].bfloat16(), *pair) for pair in zip(given[:2], scales[:2], strict=True))
        return product(functional.silu(first) * second, given[2], scales[2])

    found["torch int8 (private)"] = int8, sum(weight.nbytes for weight in given)
    return found


def main() -> int:
    """Measure; 0 if the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden", 4096), ("neurons", 14336), ("bits", 4), ("repetitions", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    given = contestants(options)
    best = reports.minima({name: run for name, (run, _) in given.items()}, options.repetitions, PAUSE_S)
    read_gb_s = given[READ][1] / best[READ] / 1e9
    weights = 3 * options.neurons * options.hidden
    rows = []
    for name, (_, nbytes) in given.items():
        gb_s = nbytes / best[name] / 1e9
        row = {"contestant": name, "minimum_ms": best[name] * 1e3, "gb_s": gb_s, "share_of_read": gb_s / read_gb_s}
        rows.append(row | {"weights_per_ns": weights / best[name] / 1e9})
        print("{contestant:24} {minimum_ms:8.3f} ms {gb_s:6.1f} GB/s {share_of_read:5.2f} of reads ".format(**rows[-1]))
    met = next(row for row in rows if row["contestant"] == OURS)["share_of_read"] >= GOAL
    print(f"goal {GOAL} of reads: {'met' if met else 'missed'}; load a core {reports.load_per_core():.1f}")
    settings = vars(options) | {"threads": torch.get_num_threads(), "load_per_core": reports.load_per_core()}
    reports.save("neuron_records", {"settings": settings, "goal": GOAL, "met": met, "rows": rows})
    return int(not met)


if __name__ == "__main__":
    raise SystemExit(main())
