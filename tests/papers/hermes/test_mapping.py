"""The offline mapping against every mapping there is, its bound, the worked example, and refusals."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.notebook_code import functions_of
from toolkit.papers.hermes.mapping import NeuronBlock, Room, block_seconds, greedy, lower_bound

EXAMPLE = NeuronBlock([0.9, 0.8, 0.2, 0.1], gpu_s=1, dimm_s=4, neuron_bytes=1)
CLOSE = 1e-9


def naive_seconds(block, places, sync_s, dimms):
    """`places`: -1 for the GPU, else the DIMM."""
    times = [0.0] * dimms
    gpu = 2 * sync_s
    for neuron, place in enumerate(places):
        if place < 0:
            gpu += block.frequency[neuron] * block.gpu_s[neuron]
        else:
            times[place] += block.frequency[neuron] * block.dimm_s[neuron]
    return max(gpu, *times)


def naive_best(blocks, room):
    """The best of all assignments: for each block, the least time for each number of bytes on the GPU; then sums."""
    choices = []
    for block in blocks:
        best = {}
        for places in product(range(-1, room.dimms), repeat=len(block.frequency)):
            used = sum(int(block.neuron_bytes[neuron]) for neuron, place in enumerate(places) if place < 0)
            seconds = naive_seconds(block, places, room.sync_s, room.dimms)
            best[used] = min(seconds, best.get(used, seconds))
        choices.append(best.items())
    chosen = (each for each in product(*choices) if sum(used for used, _ in each) <= room.gpu_bytes)
    return min(sum(seconds for _, seconds in each) for each in chosen)


@st.composite
def problems(draw):
    def one():
        frequency = draw(st.lists(st.sampled_from([0, 0.05, 0.1, 0.3, 0.5, 0.8, 1]), min_size=1, max_size=4))
        return NeuronBlock(
            frequency, draw(st.sampled_from([0.1, 1])), draw(st.sampled_from([1, 4])), draw(st.integers(1, 3))
        )

    blocks = [one() for _ in range(draw(st.integers(1, 2)))]
    room = Room(draw(st.integers(0, 12)), draw(st.integers(1, 3)), 100, draw(st.sampled_from([0, 0.2])))
    return blocks, room


def test_worked_example():
    """Two of four fit the GPU: it takes 1.7, the DIMMs 0.8 and 0.4. Split neurons would take 4/3 on both sides."""
    room = Room(gpu_bytes=2, dimms=2, dimm_bytes=2)
    found = greedy([EXAMPLE], room)
    assert found.hot[0].tolist() == [True, True, False, False]
    assert found.dimm[0].tolist() == [1, 0, 0, 1]
    assert found.seconds == pytest.approx(1.7)
    assert found.bound_s == pytest.approx(4 / 3)
    assert found.gap == pytest.approx(1.7 / (4 / 3) - 1)
    assert block_seconds(EXAMPLE, found.hot[0], np.zeros(4, dtype=np.int8), room) == pytest.approx(1.7)
    nothing = np.zeros(4, dtype=bool)  # all cold on one DIMM takes 4 · 2.0, evenly dealt 4 · 1.0
    assert block_seconds(EXAMPLE, nothing, np.zeros(4, dtype=np.int8), room) == pytest.approx(8)
    assert block_seconds(EXAMPLE, nothing, np.array([0, 1, 1, 0], dtype=np.int8), room) == pytest.approx(4)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_bound_best_and_greedy_rise(problem):
    blocks, room = problem
    best, found = naive_best(blocks, room), greedy(blocks, room)
    assert lower_bound(blocks, room) == found.bound_s <= best + CLOSE
    assert best <= found.seconds + CLOSE
    assert (
        sum(int(block.neuron_bytes[hot].sum()) for block, hot in zip(blocks, found.hot, strict=True)) <= room.gpu_bytes
    )
    naive = [
        naive_seconds(block, np.where(hot, -1, dimm), room.sync_s, room.dimms)
        for block, hot, dimm in zip(blocks, found.hot, found.dimm, strict=True)
    ]
    assert sum(naive) == pytest.approx(found.seconds)


@settings(max_examples=15, deadline=None)
@given(problems())
def test_the_program_finds_the_best(problem):
    """With one DIMM, where no neuron can be dealt to a busier one."""
    blocks, room = problem[0], replace(problem[1], dimms=1)
    found = functions_of("hermes/fig13").solve(blocks, room, limit_s=20, group=1)
    assert found.seconds == pytest.approx(naive_best(blocks, room), rel=2e-3, abs=1e-6)


def layer(neurons, seed, seconds=1.0):
    return NeuronBlock(np.random.default_rng(seed).beta(0.12, 0.48, neurons), seconds / 20, seconds, 24576)


def test_large_blocks_come_near_the_bound():
    blocks = [layer(4096, seed) for seed in range(2)] + [layer(11008, seed) for seed in range(2, 4)]
    for share in (0.02, 0.1, 0.5, 1):
        room = Room(int(share * 30208 * 24576), 8, 1 << 30, sync_s=2)
        assert 0 <= greedy(blocks, room).gap < 1e-3
