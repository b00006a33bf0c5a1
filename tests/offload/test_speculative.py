"""Guessing ahead changes how many passes there are, and no token."""

import numpy as np
import pytest
import torch

from tests.offload.test_neuron_model import GREEDY, PROMPT, Packed, least_bytes
from toolkit.errors import UserError
from toolkit.offload.model import OffloadedModel
from toolkit.offload.speculative import speculate
from toolkit.policies.sliding_window import SlidingWindow

COUNT = GREEDY["max_new_tokens"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["llama", "opt"])
def packed(request, tmp_path_factory):
    return Packed(request.param, tmp_path_factory.mktemp("speculative") / "store")


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("tight", [False, True])
def test_tokens_are_those_of_greedy_decoding(packed, ahead, tight):
    budget = least_bytes(packed, predictors=packed.predictors) if tight else None
    with OffloadedModel.open(packed.folder, predictors=packed.predictors, dram_bytes=budget) as ours:
        found = speculate(ours, PROMPT, COUNT, ahead)
    assert torch.equal(found.tokens, packed.expected(**GREEDY))
    assert found.passes + found.accepted + 1 == COUNT
    assert found.accepted <= found.proposed <= ahead * found.passes


def test_a_draft_with_all_neurons_is_always_right(packed):
    """Every layer is in memory whole, so the draft is the model itself. It reads nothing."""
    with OffloadedModel.open(packed.folder) as ours:
        found = speculate(ours, PROMPT, COUNT)
        assert found.acceptance == 1
        assert found.passes == -(-(COUNT - 1) // 5)
        assert sum(ffn.store.rows_loaded for ffn in ours.strategy.ffns) == sum(
            ffn.store.residency.units for ffn in ours.strategy.ffns
        )
        assert all(ffn.reads for ffn in ours.strategy.ffns)


def test_text_ends_with_the_token_that_ends_it(packed):
    expected = packed.expected(**GREEDY)
    end = int(expected[0, PROMPT.shape[1] + 4])
    first = int((expected[0, PROMPT.shape[1] :] == end).nonzero()[0]) + 1
    with OffloadedModel.open(packed.folder, predictors=packed.predictors) as ours:
        assert torch.equal(speculate(ours, PROMPT, COUNT, end=end).tokens, expected[:, : PROMPT.shape[1] + first])


def test_the_window_keeps_what_accepted_tokens_used(packed):
    with OffloadedModel.open(packed.folder, predictors=packed.predictors, window=2) as ours, torch.no_grad():
        for tokens in (PROMPT[:, :1], PROMPT[:, :1], PROMPT):
            ours.model(tokens)
        ffn = ours.strategy.ffns[1]
        used = ffn._of_tokens
        ours.strategy.keep(2)
        kept = np.union1d(*used[:2])
        ours.model(PROMPT[:, :1])  # older than the window is what only rejected tokens used
        assert set(np.flatnonzero(ffn.store.residency.held)) <= set(kept) | set(ffn._of_tokens[0])


def test_forgotten_neurons_go_first():
    window = SlidingWindow(10, 3)
    for active in ([1, 2], [3], [4, 5], [6]):
        window.step(np.array(active))
    window.forget(np.array([5]))
    assert window.step(np.array([7])).dropped.tolist() == [3, 5]


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"max_new_tokens": 3, "ahead": 0}])
def test_numbers_below_one_are_refused(packed, wrong):
    with OffloadedModel.open(packed.folder) as ours, pytest.raises(UserError, match="expected 1 or more"):
        speculate(ours, PROMPT, **wrong)
