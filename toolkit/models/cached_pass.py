"""Passes of transformers' models that go on from a key-value cache."""

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transformers takes a second to import, which a plan does not need
    from torch import Tensor, nn
    from transformers.cache_utils import Cache
    from transformers.modeling_outputs import CausalLMOutputWithPast

NEW_NAME = (5, 24)  # the version that gave the cache another name; it is that of the argument and in the output
CACHE = "cache" if tuple(map(int, version("transformers").split(".")[:2])) >= NEW_NAME else "past_key_values"


def cached_pass(
    model: "nn.Module", ids: "Tensor", cache: "Cache | None", use_cache: bool = True, **more: object
) -> "CausalLMOutputWithPast":
    """The output of a pass over tokens, int64 [batch, tokens], that follow those in `cache`; None begins a text."""
    return model(input_ids=ids, **{CACHE: cache}, use_cache=use_cache, **more)
