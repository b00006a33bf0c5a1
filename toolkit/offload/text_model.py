"""The interface of a model that continues texts: its passes, and a key-value cache that can be cut.

Conversations, the server and `run` use a model through it alone. `toolkit.offload.cached_model` has an opened model
behind it. Nothing here needs torch.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float


class TextModel(Protocol):
    """A decoder with the key-value cache of one text. Logits are float32; a later pass may overwrite them.

    `words` is the size of the vocabulary. `positions` is how many tokens a text may have, None if nothing says so.
    If it `repeats`, logits have the same bits however a text is cut into passes.
    """

    words: int
    positions: int | None
    repeats: bool

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that were read from the disk since the model was opened."""

    @property
    def length(self) -> int:
        """How many tokens the cache holds."""

    def prefill(self, tokens: Sequence[int]) -> Float[np.ndarray, " vocabulary"]:
        """The logits after the last of one or more tokens, computed in one pass, which adds them to the cache."""

    def scores(self, tokens: Sequence[int]) -> Float[np.ndarray, "tokens vocabulary"]:
        """The same pass with the logits after each token."""

    def step(self, token: int) -> Float[np.ndarray, " vocabulary"]:
        """The logits after one more token, which is added to the cache."""

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens of the cache at most: none, where the model cannot take a part back."""
