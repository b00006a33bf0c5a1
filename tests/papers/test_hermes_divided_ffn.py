"""Hermes's figure 13: the FFN divided among a GPU and DIMMs, and the offline mapping by each way."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.notebook_code import functions_of
from toolkit.costs.hardware import profile
from toolkit.kernels.neurons import ffn

GPU = -1


@pytest.mark.parametrize("places", [[GPU, 0, 1, 2], [GPU], [2], [0, 1]], ids=["all", "gpu alone", "one dimm", "no gpu"])
def test_a_divided_ffn_gives_the_undivided_sum_and_counts_active_bytes(places):
    """Also where all cold neurons lie on one DIMM, and where a place holds none."""
    generator = np.random.default_rng(1)
    neurons, hidden = 40, 16
    bundles, x = (torch.randn(*shape, generator=torch.manual_seed(1)) for shape in ((neurons, 3 * hidden), (hidden,)))
    gate, up, down = bundles.split(hidden, 1)
    outputs = torch.relu(gate @ x) * (up @ x)
    active, place = (outputs != 0).numpy(), generator.choice(places, neurons).astype(np.int8)
    sums, kib, seconds = functions_of("hermes/fig13").divided_product(
        bundles, partial(ffn, x=x, activation="relu"), active, place, dimms=3
    )
    torch.testing.assert_close(sums, outputs @ down)
    assert 1024 * kib[1:] == pytest.approx([12 * hidden * (active & (place == dimm)).sum() for dimm in range(3)])
    assert kib.sum() == pytest.approx(12 * hidden * active.sum() / 1024)
    assert ((seconds > 0) == (kib > 0)).all()


def test_the_offline_problem_has_two_blocks_a_layer_and_all_neurons():
    blocks, room = functions_of("hermes/fig13").offline_problem("llama2-7b")
    assert [len(block.frequency) for block in blocks] in ([4096, 11008] * 32, [4096] * 32 + [11008] * 32)
    assert {int(size) for block in blocks for size in block.neuron_bytes} == {2 * 3 * 4096}
    assert all(0 <= block.frequency.min() <= block.frequency.max() <= 1 for block in blocks)
    assert room.dimms == profile("hermes-rtx4090").near_data.dimms
