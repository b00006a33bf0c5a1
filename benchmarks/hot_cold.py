"""The kernels of Hermes's simulation beside NumPy and beside a copy of the same bytes: times, shares, ratios.

    python benchmarks/hot_cold.py                        # a layer of LLaMA2-70B: 28672 neurons
    python benchmarks/hot_cold.py --neurons 11008        # of LLaMA-7B

`drawing` draws which neurons fire, token after token; `states` raises and lowers 4-bit states and predicts by them and
two parents; `tally` counts neurons by place and level, and picks some. Contestants take turns of several calls, so that
a layer's arrays are in the caches; minima are compared.
The limit is a copy that moves as many bytes as the kernel must read and write at least, by NumPy, on one thread: small
arrays stay in the caches for both. NumPy's ways give the same results, which is checked first, but for the random
numbers. Goals: `times_numpy`. Writes results/benchmarks/hot_cold.json.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import reports
import torch

from toolkit.kernels import states
from toolkit.kernels.drawing import FIRES, KEEPS, draw_layer
from toolkit.kernels.engine.tally import pick, tally

GOALS = dict.fromkeys(("drawing", "observe", "predict", "tally", "pick"), 3.0)  # times NumPy
GAIN, LOSS, THRESHOLD, WEIGHT = 4, 1, 15, 6  # Hermes, section IV-C
USAGE, PERSISTENCE = 0.2, 0.6
CALLS = 50  # a turn, but for drawing
PLACES, LEVELS = 9, 16  # eight DIMMs and a GPU, and the states


@dataclass(frozen=True)
class Work:
    """A kernel, NumPy's way to the same result, and the bytes that are at least read or written."""

    ours: Callable[[], object]
    numpy: Callable[[], object]
    nbytes: int
    calls: int = CALLS

    def run(self, call: Callable[[], object]) -> None:
        """A turn of one contestant."""
        for _ in range(self.calls):
            call()


def drawing(neurons: int, tokens: int, rng: np.random.Generator) -> Work:
    """Two bytes a neuron and token are written: whether it fires, and by which event."""
    usage = np.full(neurons, USAGE, np.float32)
    seeds = rng.integers(1, 1 << 64, neurons, dtype=np.uint64)

    def by_numpy() -> tuple[np.ndarray, np.ndarray]:
        active, events = np.empty((tokens, neurons), np.uint8), np.empty((tokens, neurons), np.uint8)
        before = np.zeros(neurons, np.uint8)
        for token in range(tokens):
            kept = np.float32(PERSISTENCE if token else 0)
            number, fires = rng.random(neurons, dtype=np.float32), usage * (1 - kept)
            events[token] = np.where(number < fires, FIRES | KEEPS, np.where(number < fires + kept, KEEPS, 0))
            before = np.where(events[token] == KEEPS, before, events[token] > 0)
            active[token] = before
        return active, events

    for active, _ in (by_numpy(), draw_layer(usage, PERSISTENCE, tokens, seeds)):
        assert abs(active.mean() - USAGE) < 0.02, "neither law"
    return Work(partial(draw_layer, usage, PERSISTENCE, tokens, seeds), by_numpy, 2 * neurons * tokens, calls=1)


def observing(neurons: int, rng: np.random.Generator) -> Work:
    """Half a byte of state is read and written for each neuron, and a byte is read that says whether it fired."""
    found = rng.integers(0, 16, neurons, dtype=np.uint8)
    active, table = rng.random(neurons) < USAGE, states.packed(found)

    def by_numpy(plain: np.ndarray) -> None:
        plain[:] = np.where(active, np.minimum(plain + GAIN, 15), np.maximum(plain, LOSS) - LOSS)

    states.observe(table, active, GAIN, LOSS)
    by_numpy(found)
    assert (states.unpacked(table, neurons) == found).all(), "states differ"
    return Work(partial(states.observe, table, active, GAIN, LOSS), partial(by_numpy, found), 2 * neurons)


def predicting(neurons: int, rng: np.random.Generator) -> Work:
    """Half a byte of state, two numbers of parents of two bytes, their two bytes, and a byte of the result."""
    found = rng.integers(0, 16, neurons, dtype=np.uint8)
    active, table = rng.random(neurons) < USAGE, states.packed(found)
    parents = rng.integers(0, neurons, (2, neurons)).astype(np.uint16)
    out, other = np.empty(neurons, bool), np.empty(neurons, bool)

    def by_numpy() -> None:
        firing = active.view(np.uint8)[parents]
        np.greater_equal(found + WEIGHT * (firing[0] + firing[1]), THRESHOLD, out=other)

    ours = partial(states.predict, table, THRESHOLD, out, parents, active, WEIGHT)
    ours()
    by_numpy()
    assert (out == other).all(), "predictions differ"
    return Work(ours, by_numpy, round(7.5 * neurons))


def counting(neurons: int, rng: np.random.Generator) -> dict[str, Work]:
    """A byte of place and a byte of level are read for each neuron; of those picked, eight bytes are written."""
    place = rng.integers(0, PLACES, neurons).astype(np.int8)
    level = rng.integers(0, LEVELS, neurons).astype(np.uint8)
    kinds, quota = PLACES * LEVELS, np.zeros((PLACES, LEVELS), np.int64)
    quota[1:, -1] = 20

    def count() -> np.ndarray:
        return np.bincount(place.astype(np.intp) * LEVELS + level, minlength=kinds).reshape(PLACES, LEVELS)

    def choose() -> np.ndarray:
        every = [np.flatnonzero((place == spot) & (level == state))[: quota[spot, state]] for spot, state in wanted]
        return np.sort(np.concatenate(every))

    wanted = np.argwhere(quota)
    assert (tally(place, level, PLACES, LEVELS) == count()).all(), "counts differ"
    assert (pick(place, level, quota) == choose()).all(), "picks differ"
    return {
        "tally": Work(partial(tally, place, level, PLACES, LEVELS), count, 2 * neurons),
        "pick": Work(partial(pick, place, level, quota), choose, 2 * neurons),
    }


def copying(nbytes: int) -> Callable[[], object]:
    """A copy that reads and writes so many bytes together."""
    source, target = np.ones(max(1, nbytes // 2), np.uint8), np.ones(max(1, nbytes // 2), np.uint8)
    return lambda: np.copyto(target, source)


def main() -> int:
    """Measure; 0 if the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("neurons", 28672), ("tokens", 128), ("repetitions", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    works = {"drawing": drawing(options.neurons, options.tokens, rng), "observe": observing(options.neurons, rng)}
    works |= {"predict": predicting(options.neurons, rng)} | counting(options.neurons, rng)
    runs = {}
    for name, work in works.items():
        calls = {"ours": work.ours, "numpy": work.numpy, "copy": copying(work.nbytes)}
        runs |= {(name, who): partial(work.run, call) for who, call in calls.items()}
    best = reports.minima(runs, options.repetitions, 0.0)
    rows = []
    for name, work in works.items():
        ours_s, numpy_s, copy_s = (best[name, who] / work.calls for who in ("ours", "numpy", "copy"))
        times = {"ours_us": 1e6 * ours_s, "numpy_us": 1e6 * numpy_s, "copy_us": 1e6 * copy_s, "nbytes": work.nbytes}
        ratios = {"gb_s": work.nbytes / ours_s / 1e9, "share_of_copy": copy_s / ours_s, "times_numpy": numpy_s / ours_s}
        rows.append({"kernel": name} | times | ratios)
        print(
            f"{name:8} {times['ours_us']:9.1f} us {ratios['gb_s']:6.1f} GB/s {ratios['share_of_copy']:5.2f} of a copy "
            f"{ratios['times_numpy']:6.1f} x NumPy"
        )
    met = {row["kernel"]: row["times_numpy"] >= GOALS[row["kernel"]] for row in rows}
    print(f"goals {GOALS}: met {met}; {torch.get_num_threads()} threads, load a core {reports.load_per_core():.1f}")
    settings = vars(options) | {"threads": torch.get_num_threads(), "load_per_core": reports.load_per_core()}
    reports.save("hot_cold", {"settings": settings, "goals": GOALS, "met": met, "rows": rows})
    return int(not all(met.values()))


if __name__ == "__main__":
    raise SystemExit(main())
