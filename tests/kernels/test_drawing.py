"""Layers drawn at random are those of plain loops over Python's own numbers."""

import numpy as np
import pytest

from toolkit.kernels.drawing import FIRES, KEEPS, draw_layer


def oracle(usage, persistence, tokens, seeds, parents=None, before=None, copied=0.0, changes=((), (), ())):
    """The results of `draw_layer`, neuron by neuron."""
    usage, active, events = usage.copy(), [], []
    states = [int(seed) for seed in seeds]
    persistence, copied = np.float32(persistence), np.float32(copied)
    for token in range(tokens):
        for when, which, what in zip(*changes, strict=True):
            if when == token:
                usage[which] = what
        events.append([])
        active.append([])
        for i in range(len(usage)):
            x = states[i]
            x ^= x << 13 & 2**64 - 1
            x ^= x >> 7
            x ^= x << 17 & 2**64 - 1
            states[i] = x
            keeps = persistence if token else np.float32(0)
            number, fires = np.float32((x >> 40) / 2**24), usage[i] * (1 - keeps)
            event = FIRES | KEEPS if number < fires else KEEPS if number < fires + keeps else 0
            if parents is not None and np.float32((x & 0xFFFFFF) / 2**24) < copied:
                event = int(before[token, parents[i]])
            earlier = active[-2][i] if token else 0
            events[-1].append(event)
            active[-1].append(1 if event & FIRES else earlier if event & KEEPS else 0)
    return np.array(active, np.uint8), np.array(events, np.uint8)


@pytest.mark.parametrize("neurons", [1, 3, 70])
def test_a_layer_is_that_of_plain_loops(neurons):
    generator = np.random.default_rng(neurons)
    usage = generator.random(neurons, dtype=np.float32)
    usage[-1] = neurons > 3  # never, or always
    seeds = generator.integers(1, 1 << 64, neurons, dtype=np.uint64)
    changes = np.array([4, 4, 9], np.int32), np.array([0, neurons - 1, 0], np.int32), np.array([0, 1, 0.5], np.float32)
    first = draw_layer(usage, 0.6, 40, seeds, changes=changes)
    np.testing.assert_array_equal(first, oracle(usage, 0.6, 40, seeds, changes=changes))
    parents = generator.integers(0, neurons, neurons, dtype=np.int32)
    second = draw_layer(usage, 0.6, 40, seeds[::-1].copy(), parents, first[1], 0.5)
    np.testing.assert_array_equal(second, oracle(usage, 0.6, 40, seeds[::-1], parents, first[1], 0.5))
