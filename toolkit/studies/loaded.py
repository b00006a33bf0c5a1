"""The models of studies and their texts, each loaded once."""

from functools import cache, lru_cache

from jaxtyping import Int64
from torch import Tensor, nn

from toolkit.models import fast_dtype, load_model
from toolkit.models.cutting import thresholds_of
from toolkit.quality import load_tokens
from toolkit.sparsity.changed import weights_sha256

AT_ONCE = 2  # models in memory: several notebooks set two beside each other


@lru_cache(maxsize=AT_ONCE)
def loaded(name: str) -> tuple[nn.Module, object, str]:
    """A model, its tokenizer and the checksum of its weights. A caller that changes the model must restore it."""
    model, tokenizer = load_model(name, fast_dtype())
    return model, tokenizer, weights_sha256(model)


@cache
def tokens_of(model: str, corpus: str, split: str) -> Int64[Tensor, " n"]:
    """The token ids of a split of a corpus for a model (`load_tokens`)."""
    return load_tokens(corpus, loaded(model)[1], split)


def weights_key(setting) -> dict[str, object]:
    """The inputs of a result beside a study's setting, for the cache: weights, type and thresholds of its `model`."""
    model, _, weights = loaded(setting.model)
    own = thresholds_of(model)
    return {"weights_sha256": weights, "dtype": str(fast_dtype()), "thresholds": None if own is None else own.tolist()}
