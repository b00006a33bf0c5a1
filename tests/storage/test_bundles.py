"""FFNs by neuron: read back as they were, in as few ranges as can be, and computed with as the model does."""

import numpy as np
import pytest
import torch

from tests.models.test_models import FAMILIES, small
from toolkit.errors import UserError
from toolkit.kernels import neurons as kernel
from toolkit.models import decoder_blocks
from toolkit.models.ffn import decoder_ffns
from toolkit.offload.neuron_store import NeuronStore
from toolkit.policies.sliding_window import SlidingWindow
from toolkit.storage import bundles
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers import open_reader
from toolkit.storage.store import Store

HIDDEN, NEURONS = 32, 48
CHOSEN = np.array([0, 1, 2, 7, 46, 47])


@pytest.fixture(scope="module", params=["Llama", "OPT"])
def stored(request, tmp_path_factory):
    """A model, and a store of its FFNs in both layouts."""
    model = small(request.param, **FAMILIES[request.param][0]).bfloat16().eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("bundles") / "store"
    bundles.write_bundles(folder, model, "tiny", bundles.LAYOUTS)
    store = Store.open(folder)
    store.verify()
    return model, store


@pytest.mark.parametrize("layout", bundles.LAYOUTS)
def test_neurons_are_read_as_they_are(stored, layout):
    model, store = stored
    layer, ffn = store.layer(1, layout), decoder_ffns(model)[1]
    whole = torch.cat(
        [part for part in (ffn.gate and ffn.gate.weight, ffn.up.weight, ffn.down.weight.T) if part is not None], 1
    )
    rows = torch.full((len(CHOSEN), whole.shape[1]), torch.nan).bfloat16()
    with open_reader("threads", store, layout) as reader:
        bundles.read_neurons(reader, layer, CHOSEN, rows, aligned_buffer(bundles.buffer_bytes(layer, len(CHOSEN))))
    assert torch.equal(rows, whole[torch.from_numpy(CHOSEN)])


def test_a_bundle_is_one_range_of_whole_blocks(stored):
    model, store = stored
    parts = 3 if decoder_ffns(model)[0].gate else 2
    bundled, split = (bundles.neuron_part(store.layer(0, layout), CHOSEN) for layout in bundles.LAYOUTS)
    assert (len(bundled.ranges), len(split.ranges)) == (3, 3 * parts)  # 0 to 2, 7, 46 to 47
    assert all(found.start == found.offset for found in bundled.ranges)
    assert [found.nbytes for found in bundled.ranges] == [3 * BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES]
    for layout, part in (("bundled", bundled), ("split", split)):
        assert part.nbytes <= bundles.buffer_bytes(store.layer(0, layout), len(CHOSEN))
    assert bundles.neuron_part(store.layer(0, "split"), CHOSEN[:0]).ranges == ()


def test_a_store_of_neurons_that_come_from_disk_computes_what_the_model_does(stored):
    """With every neuron active, token after token, in any order of rows."""
    model, store = stored
    layer, ffn = store.layer(0, "bundled"), decoder_ffns(model)[0]
    width = (3 if ffn.gate else 2) * HIDDEN
    buffer = aligned_buffer(bundles.buffer_bytes(layer, NEURONS))
    x = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    with open_reader("threads", store, "bundled") as reader:
        held = NeuronStore(
            SlidingWindow(NEURONS, 2),
            width,
            torch.bfloat16,
            lambda neurons, rows: bundles.read_neurons(reader, layer, neurons, rows, buffer),
            ffn.up.bias,
        )
        for active in (np.arange(20), np.arange(10, 30), np.array([3]), np.arange(NEURONS)):
            held.advance(active)
    rows, bias = held.used
    found = kernel.ffn(rows, x, "silu" if ffn.gate else "relu", bias)
    block = decoder_blocks(model)[0]
    expected = block.mlp(x) if ffn.gate else torch.relu(block.fc1(x)) @ block.fc2.weight.T
    torch.testing.assert_close(found, expected.float(), rtol=0.02, atol=1e-4)


def test_bad_requests_are_refused(stored, tmp_path):
    model, store = stored
    with pytest.raises(UserError, match="unknown layout 'bundle'"):
        bundles.write_bundles(tmp_path / "store", model, "tiny", ["bundle"])
    assert not (tmp_path / "store").exists()
    with pytest.raises(UserError, match="rows 48 to 49: expected a range of its 48 rows"):
        bundles.neuron_part(store.layer(0, "bundled"), np.array([NEURONS]))
