"""Passes with a kept cache against passes over the whole text."""

import numpy as np
import pytest
import torch

from tests.offload.conftest import LAYERS
from toolkit.offload.cached_model import CachedModel
from toolkit.offload.methods import PACKED
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def whole(model, tokens):
    """The logits after each token, [tokens, vocabulary], of the model in memory."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize(("family", "method"), [("llama", f"dense{PACKED}"), ("mistral", "dense")])
def test_each_way_to_the_same_text_gives_its_logits(packed, family, method):
    """Also through a cut, after which windows begin again, and by the step for single tokens."""
    model, folder = packed(family)
    expected = whole(model, TEXT)
    with OffloadedModel.open(folder, method) as opened:
        cached = CachedModel(opened)
        np.testing.assert_allclose(cached.scores(TEXT), expected, rtol=2e-4, atol=2e-4)
        assert (cached.length, cached.words) == (len(TEXT), expected.shape[1])
        for kept in (7, 2, 0):
            cached.cut(kept)
            assert cached.length in (kept, 0)
            begun = cached.length
            cached.prefill(TEXT[begun : begun + 2])
            for at in range(begun + 2, len(TEXT)):
                logits = cached.step(TEXT[at]).copy()
                np.testing.assert_allclose(logits, expected[at], rtol=2e-4, atol=2e-4)


def test_bytes_that_are_read_are_counted_and_their_spans_are_dropped(packed):
    _, folder = packed()
    with OffloadedModel.open(folder, "dense", placement=LayerMap(0, 0, LAYERS)) as opened:
        cached = CachedModel(opened)
        cached.prefill(TEXT)
        counts = [cached.read_bytes]
        for token in TEXT:
            cached.step(token)
            counts.append(cached.read_bytes)
        a_layer = sum(run.nbytes for run in opened.store.index.ops if run.variant == "dense") / LAYERS
        assert counts[-1] - counts[0] == pytest.approx(len(TEXT) * LAYERS * a_layer, abs=3 * a_layer)  # some come early
        assert len(opened.timeline.spans) < 50
