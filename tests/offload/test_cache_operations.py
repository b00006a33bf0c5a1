"""A key-value cache that is copied, cut or rearranged goes on as that of the model in memory does."""

import copy
import pickle

import pytest
import torch
from transformers.cache_utils import DynamicCache

from tests.families import FAMILIES, HEADS, load_family
from tests.models.test_experts import mixtures
from tests.offload.conftest import pruned
from toolkit.offload.model import OffloadedModel
from toolkit.storage.experts import WholeExperts
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
FIRST = torch.tensor([27, 14])
TOKENS = torch.tensor([9, 2, 50, 33, 7, 12, 28, 4, 31, 52])
WINDOW = 10  # positions: the texts go beyond it, but not before a cache is cut
pytestmark = pytest.mark.usefixtures("one_thread")


def hybrid(place):
    """Linear attention beside full attention."""
    return load_family("Qwen3-Next", place, torch.float32)


def windows(place):
    """Sliding attention beside full attention."""
    layers = ["sliding_attention", "full_attention"]
    family = "Gemma3Text", HEADS | {"sliding_window": WINDOW, "layer_types": layers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "Gemma3", family)
        return load_family("Gemma3", place, torch.float32)


KINDS = {
    "full": (lambda place: pruned("llama"), Linears(("endor",)), "endor_packed"),
    "windows": (windows, Linears(("endor",)), "endor_packed"),
    "by neuron": (lambda place: pruned("llama"), Neurons(), None),
    "by expert": (lambda place: mixtures("Mixtral", sliding_window=None), WholeExperts(), None),
    "hybrid": (hybrid, Linears(("dense",)), "dense"),
}


@pytest.fixture(scope="module", params=KINDS)
def models(request, tmp_path_factory):
    """The model in memory, the same one from its folder, and the number of its kind."""
    place = tmp_path_factory.mktemp("caches")
    make, layout, method = KINDS[request.param]
    model = make(place / "model")
    pack_model(model, place / "packed", layout, "tiny")
    with OffloadedModel.open(place / "packed", method) as ours:
        yield model, ours.model, list(KINDS).index(request.param)


def cut(cache):
    cache.crop(-2)
    return cache


def reordered(cache):
    cache.reorder_cache(torch.tensor([0]))
    return cache


def repeated(cache):
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([1]))
    return cache


def emptied(cache):
    cache.reset()
    return cache


def of_layers(cache):
    """Each layer is copied, its tensors are not."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def of_tensors(cache):
    """transformers' own way to hand a cache to another process. The first cache is cut then, and goes on."""
    tensors = list(cache)
    cache.crop(-2)
    return tensors


def in_shared_memory(cache):
    for layer in cache.layers:
        layer.keys.share_memory_()
        layer.values.share_memory_()
    return cache


def replaced(cache):
    """The same tensors hold other memory."""
    for layer in cache.layers:
        layer.keys.data, layer.values.data = layer.keys.clone(), layer.values.clone()
    return cache


OPERATIONS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    **{made.__name__: made for made in (of_layers, of_tensors, cut, reordered, repeated, emptied)},
    **{made.__name__: made for made in (in_shared_memory, replaced)},
}
OF_POSITIONS = {"of_tensors", "cut", "repeated", "in_shared_memory", "replaced"}


def logits(model, operation, singles):
    """The logits of two texts with one beginning, token by token in turns: the cache's own, and that of its copy."""
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        found = [model(PROMPT, past_key_values=cache).logits[:, -1:]]
        found += [model(token.view(1, 1), past_key_values=cache).logits for token in FIRST[:singles]]
        other = operation(cache)
        for place, token in enumerate(TOKENS):
            found.append(model(token.view(1, 1), past_key_values=cache).logits)
            if isinstance(other, list) and place == 3:
                other = DynamicCache(other, config=model.config)
            if isinstance(other, DynamicCache):
                found.append(model((token + 1).view(1, 1), past_key_values=other).logits)
        return torch.cat(found)


def skip_of_positions(model):
    """Linear attention keeps a state."""
    if any(DynamicCache(config=model.config).is_linear):
        pytest.skip("transformers refuses it too: the layers keep no positions")


@pytest.mark.parametrize(("number", "operation"), enumerate(OPERATIONS))
def test_both_go_on_as_in_memory(models, number, operation):
    """After a prompt, or after single tokens: kinds and operations have them in turns."""
    model, ours, kind = models
    if operation in OF_POSITIONS:
        skip_of_positions(model)
    found, expected = (logits(each, OPERATIONS[operation], (number + kind) % 2 * 2) for each in (ours, model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "way", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 2}]
)
def test_ways_of_decoding_that_rearrange_the_cache(models, way):
    model, ours, _ = models
    if "prompt_lookup_num_tokens" in way:
        skip_of_positions(model)
    settings = way | {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(ours.generate(PROMPT, **settings), model.generate(PROMPT, **settings))


def test_a_cache_of_another_batch_is_refused_as_in_memory(models):
    skip_of_positions(models[0])
    for each in models[:2]:
        with torch.no_grad():
            cache = DynamicCache(config=each.config)
            each(PROMPT, past_key_values=cache)
            cache.batch_repeat_interleave(2)
            with pytest.raises(RuntimeError, match=r"[Ss]izes"):
                each(TOKENS[:1].view(1, 1), past_key_values=cache)
