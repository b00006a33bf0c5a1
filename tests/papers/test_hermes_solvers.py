"""The offline mapping by each way: rows by hand, and an interrupted run goes on where it stopped."""

import numpy as np
import pytest

from toolkit.machines.hardware import profile
from toolkit.papers.hermes import solvers
from toolkit.policies.mapping import NeuronBlock, Room, greedy

EXAMPLE = NeuronBlock([0.9, 0.8, 0.2, 0.1], gpu_s=1, dimm_s=4, neuron_bytes=1), Room(2, dimms=2, dimm_bytes=2)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The problems that were made, with the worked example in the model's place."""
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    calls = []
    monkeypatch.setattr(
        solvers, "offline_problem", lambda model, seed: calls.append(seed) or ([EXAMPLE[0]], EXAMPLE[1])
    )
    monkeypatch.setattr(solvers, "solve", lambda blocks, room, way, limit_s, gap: greedy(blocks, room))
    return calls


def test_gaps_of_the_worked_example(asked):
    """1.7 seconds, where split neurons would take 4/3."""
    table = solvers.solvers_table("toy", limit_s=1, ways=["greedy", "cbc"])
    assert table["solver"].tolist() == ["greedy", "cbc"]
    assert np.allclose(table["gap_percent"], 100 * (1.7 / (4 / 3) - 1))
    assert (table["solve_s"] >= 0).all()
    assert set(table["evidence"]) == {"measured"}


def test_an_interrupted_run_goes_on_with_the_next_way(asked, monkeypatch):
    def stopped(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(solvers, "solve", stopped)
        with pytest.raises(KeyboardInterrupt):
            solvers.solvers_table("toy", limit_s=1, ways=["greedy", "cbc", "highs"])
    assert len(asked) == 2
    first = solvers.solvers_table("toy", limit_s=1, ways=["greedy", "cbc", "highs"])
    assert len(asked) == 4  # the greedy mapping was kept
    assert solvers.solvers_table("toy", limit_s=1, ways=["greedy", "cbc", "highs"]).equals(first)
    assert len(asked) == 4


def test_the_offline_problem_has_two_blocks_a_layer_and_all_neurons():
    blocks, room = solvers.offline_problem("llama2-7b")
    assert [len(block.frequency) for block in blocks] in ([4096, 11008] * 32, [4096] * 32 + [11008] * 32)
    assert {int(size) for block in blocks for size in block.neuron_bytes} == {2 * 3 * 4096}
    assert all(0 <= block.frequency.min() <= block.frequency.max() <= 1 for block in blocks)
    assert room.dimms == profile(solvers.MACHINE).near_data.dimms
    again, _ = solvers.offline_problem("llama2-7b")
    assert all((one.frequency == two.frequency).all() for one, two in zip(blocks, again, strict=True))
