"""An opened model as a `TextModel`: passes of transformers' model, with one cache that stays between texts."""

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache

from toolkit.errors import UserError
from toolkit.models.cached_pass import cached_pass
from toolkit.offload.model import OffloadedModel

LAST = "logits_to_keep"


class CachedModel:
    """See `toolkit.offload.text_model`. Raises `UserError` for a model that has no such cache.

    The spans of the model's timeline are dropped after each pass, so that a long text takes no memory for them.
    """

    repeats = False

    def __init__(self, opened: OffloadedModel):
        model = opened.model
        if not model._supports_default_dynamic_cache():
            raise UserError(f"{type(model).__name__} keeps no key-value cache that can be cut: take another model")
        self._opened, self._model, self._noted, self.read_bytes = opened, model, False, 0
        self._config = model.config.get_text_config(decoder=True)
        self._keeps_last = LAST in inspect.signature(model.forward).parameters
        self.words: int = model.get_input_embeddings().num_embeddings
        self.positions: int | None = getattr(self._config, "max_position_embeddings", None)
        self._cache = DynamicCache(config=self._config)

    @property
    def length(self) -> int:
        """How many tokens the cache holds."""
        return self._cache.get_seq_length()

    def prefill(self, tokens: Sequence[int]) -> Float[np.ndarray, " vocabulary"]:
        """The logits after the last token."""
        return self._pass(tokens, **({LAST: 1} if self._keeps_last else {}))[-1].numpy()

    def scores(self, tokens: Sequence[int]) -> Float[np.ndarray, "tokens vocabulary"]:
        """The logits after each token."""
        return self._pass(tokens).numpy()

    def step(self, token: int) -> Float[np.ndarray, " vocabulary"]:
        """The logits after one more token."""
        logits = self.prefill([token])
        if not self._noted:
            self._opened.note_kernels()
            self._noted = True
        return logits

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens at most; none where a window has moved on, or a state was overwritten."""
        surplus = self.length - length
        if surplus <= 0:
            return
        if length and all(map(_can_be_cut, self._cache.layers)):
            self._cache.crop(-surplus)
        else:
            self._cache = DynamicCache(config=self._config)

    def _pass(self, tokens: Sequence[int], **more: object) -> Tensor:
        ids = torch.tensor([list(tokens)], device=self._opened.device.torch_device)
        with torch.no_grad(), self._opened.device.within_memory():
            logits = cached_pass(self._model, ids, self._cache, **more).logits
        self.read_bytes += self._opened.recorder.take_bytes("read")
        return logits[0].float().cpu()


def _can_be_cut(layer) -> bool:
    moved_on = getattr(layer, "is_sliding", False) and layer.get_seq_length() >= layer.sliding_window
    return layer.is_croppable and not moved_on
