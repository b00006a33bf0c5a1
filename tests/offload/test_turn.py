"""One thread at a time runs a model, and closing it waits for the pass under way."""

import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.offload.conftest import LAYERS
from toolkit.errors import UserError
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
ON_DISK = LayerMap(0, 0, LAYERS)
PATIENCE_S = 60


@pytest.fixture
def paused(packed):
    """An open model that stops in the middle of a pass until told to go on: the model, `reached` and `go`."""
    reached, go = threading.Event(), threading.Event()
    with OffloadedModel.open(packed()[1], "endor", placement=ON_DISK) as ours:

        def stop(*_):
            reached.set()
            assert go.wait(PATIENCE_S)

        ours.model.model.layers[2].register_forward_pre_hook(stop)
        yield ours, reached, go
        go.set()


def calls(ours):
    """The ways into a model."""
    hidden = torch.zeros(1, 3, 48)
    return [
        lambda: ours.generate(PROMPT, **GREEDY),
        lambda: ours.model.generate(PROMPT, **GREEDY),
        lambda: ours.model(PROMPT),
        lambda: ours.model.model.layers[0].mlp(hidden),
    ]


@pytest.mark.parametrize("first", range(3))
def test_a_second_thread_is_refused_and_the_first_is_right(packed, paused, first):
    model, _ = packed()
    ours, reached, go = paused
    with ThreadPoolExecutor(1) as other:
        running = other.submit(calls(ours)[first])
        assert reached.wait(PATIENCE_S)
        for call in calls(ours):
            with pytest.raises(UserError, match="running in another thread: wait for it, or open the folder once more"):
                call()
        go.set()
        found = running.result()
    if first < 2:
        assert torch.equal(found, model.generate(PROMPT, **GREEDY))
    else:
        assert torch.equal(found.logits, model(PROMPT).logits)
    assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))


def test_closing_waits_for_the_pass_and_ends_the_text_with_its_cause(paused):
    ours, reached, go = paused
    with ThreadPoolExecutor(2) as others:
        running = others.submit(ours.generate, PROMPT, **GREEDY)
        assert reached.wait(PATIENCE_S)
        closing = others.submit(ours.close)
        while not ours._turn._ended:
            time.sleep(0.001)
        with pytest.raises(TimeoutError):
            closing.result(0.3)
        go.set()
        with pytest.raises(UserError, match="this model was closed"):
            running.result(PATIENCE_S)
        closing.result(PATIENCE_S)


def test_a_model_that_is_closed_during_its_own_pass_says_so(packed):
    with OffloadedModel.open(packed()[1], "endor", placement=ON_DISK) as ours:
        ours.model.model.layers[2].register_forward_pre_hook(lambda *_: ours.close())
        with pytest.raises(UserError, match="this model was closed"):
            ours.model(PROMPT)


def test_an_opened_model_is_not_copied(packed):
    """A lock or an open file in it would fail in words of their own."""
    with OffloadedModel.open(packed()[1], placement=ON_DISK) as ours:
        with pytest.raises(UserError, match="cannot be copied or pickled: open its folder once more"):
            copy.deepcopy(ours.model)
        with pytest.raises(UserError, match="cannot be copied or pickled"):
            pickle.dumps(ours.model.model.layers[0].mlp.up_proj)
