"""Passes of transformers' models that go on from a key-value cache."""

from dataclasses import fields

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

# the name of the cache in this version of transformers, of the argument and in the output: `cache` from 5.24 on
CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))


def cached_pass(model: nn.Module, ids: Tensor, cache: Cache | None, **more: object) -> CausalLMOutputWithPast:
    """The output of a pass over tokens, int64 [batch, tokens], that follow those in `cache`; None begins a text."""
    return model(input_ids=ids, **{CACHE: cache}, use_cache=True, **more)
