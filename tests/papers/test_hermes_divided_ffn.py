"""The FFN of Hermes's figure 13, divided among a GPU and DIMMs."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.notebook_code import functions_of
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
