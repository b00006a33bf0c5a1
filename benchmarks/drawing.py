"""The kernel that draws which neurons fire, token after token, beside NumPy's way and beside a copy of the same bytes.

    python benchmarks/drawing.py                        # a layer of LLaMA2-70B: 28672 neurons
    python benchmarks/drawing.py --neurons 11008        # of LLaMA-7B

Both draw by the same law from other random numbers. Minima are compared. Goal: 3 times NumPy. Writes
results/benchmarks/drawing.json.
"""

import argparse
from functools import partial

import numpy as np
import reports
import torch

from toolkit.kernels.drawing import FIRES, KEEPS, draw_layer

GOAL = 3.0  # times NumPy
USAGE, PERSISTENCE = 0.2, 0.6


def by_numpy(usage: np.ndarray, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Which neurons are active for each token, one token after the other."""
    active, before = np.empty((tokens, len(usage)), np.uint8), np.zeros(len(usage), np.uint8)
    for token in range(tokens):
        kept = np.float32(PERSISTENCE if token else 0)
        number, fires = rng.random(len(usage), dtype=np.float32), usage * (1 - kept)
        events = np.where(number < fires, FIRES | KEEPS, np.where(number < fires + kept, KEEPS, 0))
        before = np.where(events == KEEPS, before, events > 0)
        active[token] = before
    return active


def main() -> int:
    """Measure; 0 if the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("neurons", 28672), ("tokens", 128), ("repetitions", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rng, nbytes = np.random.default_rng(0), 2 * options.neurons * options.tokens  # a neuron's activity and its event
    usage = np.full(options.neurons, USAGE, np.float32)
    seeds = rng.integers(1, 1 << 64, options.neurons, dtype=np.uint64)
    source, target = np.ones(nbytes // 2, np.uint8), np.ones(nbytes // 2, np.uint8)
    runs = {
        "ours": partial(draw_layer, usage, PERSISTENCE, options.tokens, seeds),
        "numpy": partial(by_numpy, usage, options.tokens, rng),
        "copy": partial(np.copyto, target, source),
    }
    for active in (runs["ours"]()[0], runs["numpy"]()):
        assert abs(active.mean() - USAGE) < 0.02, "neither law"
    best = reports.minima(runs, options.repetitions, 0.0)
    row = {f"{name}_us": 1e6 * seconds for name, seconds in best.items()} | {"nbytes": nbytes}
    row |= {"share_of_copy": best["copy"] / best["ours"], "times_numpy": best["numpy"] / best["ours"]}
    print(f"drawing {row['ours_us']:9.1f} us, {row['share_of_copy']:.2f} of a copy, {row['times_numpy']:.1f} x NumPy")
    settings = vars(options) | {"threads": torch.get_num_threads(), "load_per_core": reports.load_per_core()}
    reports.save("drawing", {"settings": settings, "goal": GOAL, "row": row})
    return int(row["times_numpy"] < GOAL)


if __name__ == "__main__":
    raise SystemExit(main())
