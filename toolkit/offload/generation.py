"""Text that a model continues, token by token, with the key-value cache of the text before.

    writer = Writer(model, tokenizer, ends={2}, context=2048)
    for piece in writer.continued(tokens, Request(Sampling(0.7), most=100)):
        print(piece.text, end="")

Tokens at the beginning that the cache holds already are not computed again: of a conversation only what is new. A
prompt is computed in passes of `PASS` tokens, so that its activations take little memory.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from toolkit.errors import UserError
from toolkit.offload.sampling import Sampler, Sampling, log_probabilities
from toolkit.offload.text_model import TextModel
from toolkit.offload.words import LEAD, Words

PASS = 256  # tokens of a prompt: from here on its products take longer than reading the weights
SCORES_BYTES = 32_000_000  # of logits that exist at once where each token of a prompt is scored
FLOAT = 4


@dataclass(frozen=True)
class Request:
    """How a text is continued: `most` tokens (None: as many as fit), until one of the texts `stops` comes.

    `likeliest` asks for the logarithms of probabilities: of each token, and of so many likeliest ones in its place.
    """

    sampling: Sampling = field(default_factory=Sampling)
    most: int | None = None
    stops: tuple[str, ...] = ()
    likeliest: int | None = None


@dataclass(frozen=True)
class Score:
    """The natural logarithm of a token's probability; the likeliest ones in its place, in falling order."""

    logarithm: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TextPiece:
    """One more token of a text. `text` is empty while a character or a stop text may be incomplete.

    `end` says why the text ends here: "stop" (the model ended it, or a stop text came), "length" (`most` tokens),
    "context" (no room), "cancelled"; else it is empty. The token by which the model ends it has no text; a
    cancelled one is None.
    `given` tokens are a prompt's.
    """

    token: int | None
    text: str = ""
    end: str = ""
    score: Score | None = None
    given: bool = False

    @property
    def is_new(self) -> bool:
        """Whether the model has made this token."""
        return self.token is not None and not self.given


class Writer:
    """Continues one text after the other with one model.

    Args:
        model: its cache stays from text to text.
        tokenizer: with `decode(tokens, skip_special_tokens=...)`, as those of transformers.
        ends: tokens by which the model ends a text.
        context: tokens that a text may have.
        exact: use the cache only as far as the same passes would give the same bits. A text depends on nothing before
            it then. Unless the model `repeats`, these are whole passes of a prompt: the last digits of single tokens
            differ.
    """

    def __init__(self, model: TextModel, tokenizer: Any, ends: Collection[int], context: int, exact: bool = False):
        self.model, self.tokenizer, self.ends, self.context = model, tokenizer, ends, context
        self._in_passes = exact and not model.repeats
        self._tokens: list[int] = []  # those in the cache
        self._passed = 0  # of them, those that whole passes from the beginning computed

    def continued(
        self,
        prompt: Sequence[int],
        request: Request,
        cancelled: Callable[[], bool] = lambda: False,
        logits: Float[np.ndarray, " vocabulary"] | None = None,
    ) -> Iterator[TextPiece]:
        """The pieces that follow a prompt; `cancelled` is asked before each pass.

        `logits` are those after the prompt if `scored` has just given them; None computes them.

        Raises `UserError` for a prompt without a token, or one that fills the context.
        """
        self._check(prompt)
        choose, words = Sampler(request.sampling), Words(self._decoded, prompt[-LEAD:], request.stops)
        most = min(request.most or self.context, self.context - len(prompt))
        at_most = "length" if most == request.most else "context"
        logits = self._read(prompt, cancelled) if logits is None else logits
        for count in range(1, most + 1):
            if logits is None or cancelled():
                yield TextPiece(None, words.rest(), "cancelled")
                return
            token = choose(logits)
            score = _score(logits, token, request.likeliest)
            if token in self.ends:
                yield TextPiece(token, words.rest(), "stop", score)
                return
            text = words.add(token)
            end = "stop" if words.stopped else at_most if count == most else ""
            yield TextPiece(token, text + words.rest() if end else text, end, score)
            if end:
                return
            logits = self._pass([token], lambda token=token: self.model.step(token))

    def scored(
        self, prompt: Sequence[int], likeliest: int, cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[list[Score | None], Float[np.ndarray, " vocabulary"] | None]:
        """How likely each token of a prompt is after those before it, None for the first one; the logits after all.

        Both are empty if it is cancelled.
        """
        self._check(prompt)
        self._cut(0)
        at_once = max(1, min(PASS, SCORES_BYTES // (FLOAT * self.model.words)))
        scores: list[Score | None] = [None]
        for begin in range(0, len(prompt), at_once):
            if cancelled():
                return [], None
            part = prompt[begin : begin + at_once]
            rows = self._pass(part, lambda part=part: self.model.scores(part))
            following = prompt[begin + 1 : begin + 1 + len(part)]
            scores += [_score(row, token, likeliest) for row, token in zip(rows, following, strict=False)]
        return scores, rows[-1]

    def forget(self) -> None:
        """Empty the cache."""
        self._cut(0)

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise UserError("a prompt of no token: give the model at least a word to go on from")
        if len(prompt) >= self.context:
            raise UserError(
                f"a text of {len(prompt)} tokens fills the context of {self.context}: give a shorter one, or a larger "
                "--context at the start"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.model.words:
            raise UserError(f"token ids from {min(prompt)} to {max(prompt)}: the model has 0 to {self.model.words - 1}")

    def _read(self, prompt: Sequence[int], cancelled: Callable[[], bool]) -> Float[np.ndarray, " vocabulary"] | None:
        """The logits after a prompt, of which the cache keeps the beginning; None if it was cancelled."""
        pairs = zip(self._tokens, prompt[:-1], strict=False)
        same = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(self._tokens), len(prompt) - 1))
        self._cut(min(same, self._passed) // PASS * PASS if self._in_passes else same)
        logits = None
        while (begun := len(self._tokens)) < len(prompt):
            if cancelled():
                return None
            part = prompt[begun : begun + PASS]
            logits = self._pass(part, lambda part=part: self.model.prefill(part))
            if self._passed == begun and len(part) == PASS:
                self._passed += PASS
        return logits

    def _pass(self, tokens: Sequence[int], compute: Callable[[], np.ndarray]) -> np.ndarray:
        """The logits of a pass over tokens. If it fails, the cache is emptied: it may hold a part of them."""
        try:
            logits = compute()
        except BaseException:
            self.model.cut(0)
            self._tokens, self._passed = [], 0
            raise
        self._tokens.extend(tokens)
        return logits

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _cut(self, length: int) -> None:
        self.model.cut(length)
        del self._tokens[self.model.length :]
        self._passed = min(self._passed, len(self._tokens))


def _score(logits: Float[np.ndarray, " vocabulary"], token: int, likeliest: int | None) -> Score | None:
    if likeliest is None:
        return None
    logarithms = log_probabilities(logits)
    best = np.argpartition(-logarithms, min(likeliest, len(logarithms) - 1))[:likeliest]
    best = best[np.lexsort((best, -logarithms[best]))]
    return Score(float(logarithms[token]), tuple((int(at), float(logarithms[at])) for at in best))
