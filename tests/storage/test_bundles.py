"""FFNs by neuron: read back as they were, in as few ranges as can be."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.test_models import FAMILIES, small
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.storage import bundles
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers import open_reader
from toolkit.storage.store import Store
from toolkit.storage.writing import write_store

NEURONS = 48
CHOSEN = np.array([0, 1, 2, 7, 46, 47])


@pytest.fixture(scope="module", params=["Llama", "OPT"])
def stored(request, tmp_path_factory):
    """A model, and a store of its FFNs in both layouts."""
    model = small(request.param, **FAMILIES[request.param]).bfloat16().eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("bundles") / "store"
    write_store(folder, bundles.bundle_ops(decoder_ffns(model), bundles.LAYOUTS))
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


def test_adjoining_bundles_are_a_run_of_their_own(stored):
    run = stored[1].layer(1, "bundled").ops["ffn.bundle"]
    with open_reader("threads", stored[1], "bundled") as reader:
        found = []
        for first, last in [(0, NEURONS), (0, 5), (5, NEURONS), (7, 7)]:
            part = bundles.adjoining(run, first, last)
            assert part.nbytes == (last - first) * BLOCK_BYTES
            buffer = aligned_buffer(part.nbytes)
            reader.read(part.chunks, buffer)
            found.append(part.view(buffer).decode())
    assert torch.equal(torch.cat(found[1:3]), found[0])
    assert found[3].shape == (0, run.shape[1])


def test_a_bundle_is_one_read_of_whole_blocks(stored):
    """Neurons that follow each other are one read in each matrix, and so are those beyond a gap that is allowed."""
    model, store = stored
    count = 3 if decoder_ffns(model)[0].gate else 2
    bundled, split = store.layer(0, "bundled"), store.layer(0, "split")
    chunks, _ = bundles.buffered_chunks(bundled, CHOSEN)  # 0 to 2, 7, 46 to 47
    assert (chunks.sizes // BLOCK_BYTES).tolist() == [3, 1, 2]
    assert chunks.places.tolist() == [0, 3 * BLOCK_BYTES, 4 * BLOCK_BYTES]
    chunks, _ = bundles.buffered_chunks(bundled, CHOSEN, gap_bytes=4 * BLOCK_BYTES)
    assert (chunks.sizes // BLOCK_BYTES).tolist() == [8, 2]
    chunks, _ = bundles.buffered_chunks(split, CHOSEN)  # a row has 64 bytes: all that is chosen lies in one block
    assert (chunks.sizes // BLOCK_BYTES).tolist() == [1] * count
    for layer in (bundled, split):
        for gap in (0, BLOCK_BYTES, 1 << 20):
            chunks, _ = bundles.buffered_chunks(layer, CHOSEN, gap)
            assert chunks.sizes.sum() <= bundles.buffer_bytes(layer, len(CHOSEN), gap)
        assert len(bundles.buffered_chunks(layer, CHOSEN[:0])[0].sizes) == 0


WIDE, FEW = 2048, 10  # a row of whole blocks in bf16


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A store of one FFN whose rows are whole blocks, and its bundles."""
    generator = torch.Generator().manual_seed(1)
    up, down = (torch.randn(FEW, WIDE, generator=generator).bfloat16() for _ in range(2))
    folder = tmp_path_factory.mktemp("wide") / "store"
    ffn = FFN.of(torch.nn.Linear(WIDE, FEW, dtype=torch.bfloat16), torch.nn.Linear(FEW, WIDE, dtype=torch.bfloat16))
    ffn.up.weight.data, ffn.down.weight.data = up, down.T
    write_store(folder, bundles.bundle_ops([ffn], bundles.LAYOUTS))
    return Store.open(folder), torch.cat([up, down], 1)


@settings(max_examples=30, deadline=None)
@given(
    layout=st.sampled_from(bundles.LAYOUTS),
    chosen=st.sets(st.integers(0, FEW - 1)),
    aligned=st.booleans(),
    gap=st.sampled_from([0, BLOCK_BYTES, 1 << 20]),
)
def test_reads_into_rows_and_through_the_buffer_give_the_same(wide, layout, chosen, aligned, gap):
    store, expected = wide
    layer, neurons = store.layer(0, layout), np.array(sorted(chosen), dtype=np.int64)
    memory = torch.from_numpy(aligned_buffer((len(neurons) + 1) * 4 * WIDE))
    memory[:] = 7
    shift = 0 if aligned else 2
    rows = memory[shift : shift + len(neurons) * 4 * WIDE].view(torch.bfloat16).view(len(neurons), 2 * WIDE)
    with open_reader("threads", store, layout, chunk_bytes=BLOCK_BYTES, depth=3) as reader:
        buffer = aligned_buffer(0 if aligned else bundles.buffer_bytes(layer, len(neurons), gap))
        bundles.read_neurons(reader, layer, neurons, rows, buffer, gap)
    assert torch.equal(rows, expected[torch.from_numpy(neurons)])
    assert (memory[rows.nbytes + shift :] == 7).all()


def test_rows_are_filled_without_a_copy_in_one_read_a_run_of_neurons(wide):
    store, _ = wide
    bundled, split = (
        bundles.straight_chunks(store.layer(0, layout), np.array([1, 2, 3, 7])) for layout in ("bundled", "split")
    )
    row = 2 * WIDE
    assert bundled.sizes.tolist() == [6 * row, 2 * row]
    assert bundled.places.tolist() == [0, 6 * row]
    assert split.sizes.tolist() == [row] * 8
    assert split.places.tolist() == [row * number for number in range(8)]
