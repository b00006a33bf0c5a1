"""Text that a model continues, token by token, with the key-value cache of the text before.

    writer = Writer(model, tokenizer, ends={2}, context=2048)
    for piece in writer.continued(tokens, Request(Sampling(0.7), most=100)):
        print(piece.text, end="")

Tokens at the beginning that the cache holds already are not computed again: of a conversation only what is new. A
prompt is computed in passes of `PASS` tokens, so that its activations take little memory. The last digits of logits
depend on how tokens are cut into passes, so `Reuse` says which of the cache's tokens may stay.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from jaxtyping import Float

from toolkit.errors import UserError
from toolkit.offload.sampling import Sampler, Sampling, log_probabilities
from toolkit.offload.text_model import TextModel
from toolkit.offload.words import LEAD, Words

PASS = 256  # tokens of a prompt: from here on its products take longer than reading the weights
SCORES_BYTES = 16_000_000  # of logits that exist at once where each token of a prompt is scored
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


class Reuse(Enum):
    """Which tokens of the cache stay if the next text begins with them. A model that `repeats` keeps all of them.

    TOKENS: all. PASSES: up to where a pass began, so that the same text gives the same bits a second time; an answer
    stays, whose tokens came one by one. ALONE: whole passes of a prompt, as an empty cache would have them. A text
    depends on nothing before it then.
    """

    TOKENS = "tokens"
    PASSES = "passes"
    ALONE = "alone"


class Writer:
    """Continues one text after the other with one model.

    Args:
        model: its cache stays from text to text.
        tokenizer: with `decode(tokens, skip_special_tokens=...)`, as those of transformers.
        ends: tokens by which the model ends a text.
        context: tokens that a text may have.
        reuse: which tokens of the cache stay.
    """

    def __init__(
        self,
        model: TextModel,
        tokenizer: Any,
        ends: Collection[int],
        context: int,
        reuse: Reuse = Reuse.TOKENS,
    ):
        self.model, self.tokenizer, self.ends, self.context = model, tokenizer, ends, context
        self._reuse = Reuse.TOKENS if model.repeats else reuse
        self._tokens: list[int] = []  # those in the cache
        self._begins: list[int] = []  # where each pass that computed them began

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
            self._begins.clear()  # a prompt that is not scored has other passes
            following = prompt[begin + 1 : begin + 1 + len(part)]
            scores += [_score(row, token, likeliest) for row, token in zip(rows, following, strict=False)]
            last = rows[-1].copy()
            del rows  # there is memory for those of one pass
        return scores, last

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
        self._cut(self._kept(same))
        logits = None
        while (begun := len(self._tokens)) < len(prompt):
            if cancelled():
                return None
            part = prompt[begun : begun + PASS]
            logits = self._pass(part, lambda part=part: self.model.prefill(part))
        return logits

    def _kept(self, same: int) -> int:
        """How many of the first `same` tokens of the cache stay."""
        if self._reuse is Reuse.TOKENS:
            return same
        cuts = [*self._begins, len(self._tokens)]
        if self._reuse is Reuse.ALONE:
            cuts = [cut for number, cut in enumerate(cuts) if cut == number * PASS]
        before = bisect_right(cuts, same)
        return cuts[before - 1] if before else 0

    def _pass(self, tokens: Sequence[int], compute: Callable[[], np.ndarray]) -> np.ndarray:
        """The logits of a pass over tokens. If it fails, the cache is emptied: it may hold a part of them."""
        try:
            logits = compute()
        except BaseException:
            self.model.cut(0)
            self._tokens, self._begins = [], []
            raise
        self._begins.append(len(self._tokens))
        self._tokens.extend(tokens)
        return logits

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _cut(self, length: int) -> None:
        self.model.cut(length)
        del self._tokens[self.model.length :]
        del self._begins[bisect_left(self._begins, len(self._tokens)) :]


def _score(logits: Float[np.ndarray, " vocabulary"], token: int, likeliest: int | None) -> Score | None:
    if likeliest is None:
        return None
    logarithms = log_probabilities(logits)
    best = np.argpartition(-logarithms, min(likeliest, len(logarithms) - 1))[:likeliest]
    best = best[np.lexsort((best, -logarithms[best]))]
    return Score(float(logarithms[token]), tuple((int(at), float(logarithms[at])) for at in best))
