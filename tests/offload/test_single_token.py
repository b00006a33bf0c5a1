"""The step for single tokens gives what transformers gives, and only steps in where it can."""

import gc
import weakref

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from tests.offload.conftest import FAMILIES, GATED, GEMMA3, LAYERS, pruned
from toolkit.offload import single_token
from toolkit.offload.growing_cache import GrowingLayer, GrowingWindow
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.offload.single_token import SingleToken
from toolkit.storage.packing import Linears, pack_model

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
MORE = torch.tensor([[9, 2, 60, 33, 7, 7, 28]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
SERVED = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama3": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "max_position_embeddings": 8,
    },
    "mistral": {"sliding_window": None, "num_key_value_heads": 1},
    "qwen3": {},
    "qwen2": {},
    "gemma3": {},
}


@pytest.fixture
def calls(monkeypatch):
    """How often the step has run."""
    found, step = [], SingleToken.__call__
    monkeypatch.setattr(SingleToken, "__call__", lambda self, *given: found.append(1) or step(self, *given))
    return found


def stepwise(model, cache):
    """The logits after the prompt and after each further token."""
    with torch.no_grad():
        found = [model(PROMPT, past_key_values=cache, use_cache=True).logits[:, -1:]]
        return found + [
            model(input_ids=token, past_key_values=cache, use_cache=True).logits for token in MORE.T[:, None]
        ]


@pytest.fixture(scope="module", params=SERVED)
def served(request, tmp_path_factory):
    """A model that the step serves, and the folder that it is packed in."""
    family = request.param
    known = {**FAMILIES, "llama3": FAMILIES["llama"], "qwen2": (Qwen2ForCausalLM, Qwen2Config, GATED), "gemma3": GEMMA3}
    model, config, sizes = known[family]
    model = pruned((model, config, sizes | SERVED[family]))
    folder = tmp_path_factory.mktemp(family) / "store"
    pack_model(model, folder, Linears(("endor",)), family)
    return model, folder


def test_products_are_bound_once_for_each_slot_that_a_layer_passes_through(packed, monkeypatch):
    """Three layers are read through two slots, so each lies in the other slot at the next token."""
    made, program = [], single_token.Program
    monkeypatch.setattr(single_token, "Program", lambda stages: made.append(1) or program(stages))
    with OffloadedModel.open(packed()[1], "endor_packed", placement=LayerMap(0, 1, 3)) as ours:
        stepwise(ours.model, DynamicCache())
    assert len(made) == 1 + 2 * 3  # the layer that stays is one stretch


def test_a_step_holds_no_cache_of_an_earlier_text(packed):
    with OffloadedModel.open(packed()[1], "endor_packed") as ours:
        cache = DynamicCache()
        stepwise(ours.model, cache)
        rooms = [weakref.ref(layer.room) for layer in cache.layers]
        del cache
        gc.collect()
        assert not any(room() is not None for room in rooms)


def test_all_that_stays_is_one_call(packed):
    """Layers that pass have a call each, and the last of them has the norm and the head."""
    with OffloadedModel.open(packed()[1], "endor_packed") as ours:
        assert len(SingleToken.of(ours.model).stretches) == 1
    with OffloadedModel.open(packed()[1], "endor_packed", placement=LayerMap(0, 1, 3)) as ours:
        assert len(SingleToken.of(ours.model).stretches) == 1 + 3


@pytest.mark.parametrize("where", [LayerMap(0, LAYERS, 0), LayerMap(0, 1, LAYERS - 1)])
def test_logits_and_tokens_are_those_of_the_model_in_memory(served, calls, where):
    model, folder = served
    with OffloadedModel.open(folder, "endor_packed", placement=where) as ours:
        cache, expected = DynamicCache(config=model.config), DynamicCache(config=model.config)
        for found, wanted in zip(stepwise(ours.model, cache), stepwise(model, expected), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert len(calls) == MORE.shape[1]
        for found, wanted in zip(cache.layers, expected.layers, strict=True):
            torch.testing.assert_close(found.keys, wanted.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.values, wanted.values, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
        assert len(calls) == MORE.shape[1] + GREEDY["max_new_tokens"] - 1


def test_transformers_goes_on_where_the_step_left_off(packed, calls):
    """And the step goes on where transformers left off, after it made the cache longer and shorter."""
    model, folder = packed("llama")
    with OffloadedModel.open(folder, "endor_packed") as ours, torch.no_grad():
        caches = DynamicCache(), DynamicCache()
        for tokens, cut in [
            (PROMPT, 0),
            (MORE[:, :1], 0),
            (MORE, 3),
            (PROMPT[:, :1], 0),
            (PROMPT[:, :1], 1),
            (MORE[:, :1], 0),
        ]:
            found, wanted = (
                each(tokens, past_key_values=cache).logits[:, -1]
                for each, cache in zip((ours.model, model), caches, strict=True)
            )
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            for cache in caches:
                cache.crop(-cut)
    assert len(calls) == 4


def test_room_grows(monkeypatch):
    monkeypatch.setattr("toolkit.offload.growing_cache.ROOM", 4)
    layer, expected = GrowingLayer(), torch.zeros(1, 2, 0, 3)
    layer.update(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
    expected = layer.keys
    for _ in range(20):
        key, value = torch.randn(2, 3), torch.randn(2, 3)
        expected = torch.cat([expected, key[None, :, None]], dim=2)
        (*addresses, room), (start, end) = layer.reserve()
        layer.room[:, 0, :, end - 1] = torch.stack([key, value])
        assert torch.equal(layer.keys, expected)
        assert torch.equal(layer.values[0, :, -1], value)
        assert torch.equal(layer.room[0][0, :, start:end], expected[0])
        assert addresses == [half.data_ptr() for half in layer.room]
        assert room == layer.room.shape[3]


@pytest.mark.parametrize("prompt", [1, 3, 4, 9])
def test_a_window_moves_as_that_of_transformers(monkeypatch, prompt):
    """Also when transformers adds positions in between."""
    monkeypatch.setattr("toolkit.offload.growing_cache.ROOM", 3)
    torch.manual_seed(prompt)
    theirs, first = DynamicSlidingWindowLayer(4), torch.randn(2, 1, 2, prompt, 3)
    theirs.update(*first)
    ours = GrowingWindow.of(theirs)
    for step in range(20):
        pair = torch.randn(2, 1, 2, 1 if step % 7 else 2, 3)
        expected = theirs.update(*pair)
        if pair.shape[3] > 1:
            ours.update(*pair)
            continue
        _, (start, end) = ours.reserve()
        ours.room[:, 0, :, end - 1] = pair[:, 0, :, 0]
        for half, attended in zip(ours.room, expected, strict=True):
            assert torch.equal(half[:, :, start:end], attended)
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize(
    "named",
    [
        {"output_hidden_states": True},
        {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]])},
        {"use_cache": False},
        {"return_dict": False},
    ],
)
def test_what_the_step_cannot_give_is_left_to_transformers(packed, calls, named):
    model, folder = packed("llama")
    with OffloadedModel.open(folder, "endor_packed") as ours, torch.no_grad():
        given = []
        for each in (ours.model, model):
            cache = DynamicCache()
            each(input_ids=PROMPT, past_key_values=cache)
            given.append(each(input_ids=MORE[:, :1], past_key_values=cache, **named))
        assert not calls
        torch.testing.assert_close(given[0][0], given[1][0], rtol=1e-4, atol=1e-4)
        assert len(given[0]) == len(given[1])


def test_hooks_are_called(packed, calls):
    _, folder = packed("llama")
    with OffloadedModel.open(folder, "endor_packed") as ours, torch.no_grad():
        cache, seen = DynamicCache(), []
        ours.model(input_ids=PROMPT, past_key_values=cache)
        hook = ours.model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
        ours.model(input_ids=MORE[:, :1], past_key_values=cache)
        assert seen
        assert not calls
        hook.remove()
        ours.model(input_ids=MORE[:, :1], past_key_values=cache)
        assert calls


@pytest.mark.parametrize(
    ("family", "dtype", "method"),
    [
        ("opt", torch.float32, "endor_packed"),  # no gates
        ("mistral", torch.float32, "endor_packed"),  # a sliding window
        ("llama", torch.bfloat16, "endor"),  # decoded weights keep the bits of the model in memory
    ],
)
def test_others_are_left_to_transformers(packed, calls, family, dtype, method):
    model, folder = packed(family, dtype)
    with OffloadedModel.open(folder, method) as ours:
        assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
    assert not calls
