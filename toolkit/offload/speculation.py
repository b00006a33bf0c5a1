"""Speculative decoding: how many tokens a draft proposes a pass, and what that brought.

One pass of the full model checks all tokens that the draft proposed: from disk it costs about the same for one token
and for ten (Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023).

    model = Drafted(model, draft)    # both `TextModel`s; it gives the logits of the first, sooner
    model.counts.tokens_a_pass
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from toolkit.errors import UserError
from toolkit.offload.sampling import log_probabilities
from toolkit.offload.text_model import TextModel

MOST_DRAFTED = 24  # tokens a pass
FIRST_DRAFTED = 4  # in the first pass, when no time and no acceptance is known: the λ of LLM in a flash

Logits = Float[np.ndarray, " vocabulary"]


@dataclass
class Speculation:
    """The counts of a text of `tokens`, without the pass over its prompt: `passes` of the full model, and its seconds.

    At `close` tokens the logit exceeds the second largest by no more than rounding. There the full model might choose
    the other one in a pass over another number of tokens.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    close: int = 0
    draft_s: float = 0.0
    check_s: float = 0.0
    expected: float = 0.0  # tokens that would have been accepted if the draft's own probabilities were right

    @property
    def acceptance(self) -> float:
        """The share of the drafted tokens that were accepted; NaN without one."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def tokens_a_pass(self) -> float:
        """Tokens that a pass of the full model gave; NaN without one."""
        return (self.accepted + self.passes) / self.passes if self.passes else float("nan")

    def worth(self) -> float:
        """The lowest probability of acceptance at which one more drafted token pays.

        One more token costs the seconds of a draft's step, and gains one token with this probability. So it pays while
        the probability exceeds those seconds times the tokens per second so far.
        """
        if not self.drafted:
            return 0.0
        return self.draft_s / self.drafted * (self.accepted + self.passes) / (self.draft_s + self.check_s)

    def trust(self) -> float:
        """Accepted tokens over those that the draft's probabilities promised; 1 at first."""
        return (self.accepted + 1) / (self.expected + 1)

    def check(self, promised: Sequence[float]) -> None:
        """Count a pass of the full model that checks tokens, which the draft gave these probabilities."""
        self.passes, self.drafted = self.passes + 1, self.drafted + len(promised)
        self.expected += sum(promised[:1])

    def accept(self, promised: Sequence[float], place: int) -> None:
        """Count one of these tokens as accepted; the next one counts as expected."""
        self.accepted += 1
        self.expected += sum(promised[place + 1 : place + 2])


class Proposal:
    """The tokens that a draft proposes in one pass: `fixed` ones, or as long as a further one is worth its time.

    `most` is how many there is room for. `promised` are the draft's own probabilities of its tokens.
    """

    def __init__(self, counts: Speculation, most: int, fixed: int | None = None):
        self.limit = min(most, fixed or (MOST_DRAFTED if counts.drafted else FIRST_DRAFTED))
        self.promised: list[float] = []
        self._worth, self._trust, self._chance = (0.0 if fixed else counts.worth()), counts.trust(), 1.0

    @property
    def goes_on(self) -> bool:
        """Whether one more token is proposed."""
        return len(self.promised) < self.limit and self._chance > self._worth

    def add(self, probability: float) -> None:
        """Note the probability of one more token."""
        self.promised.append(probability)
        self._chance *= min(1.0, probability * self._trust)


class Drafted:
    """A `TextModel` whose logits are those of `model`, computed for several tokens at once if a draft foresees them.

    Whoever chooses tokens by these logits accepts a proposed token by choosing it. So the text is that of the model
    alone, greedy or sampled, if its logits are the same in passes over one token and over several. The draft proposes
    its likeliest tokens. `fixed` is how many; None proposes while a further token is worth its time, `MOST_DRAFTED` at
    most. Raises `UserError` for a draft of another vocabulary.
    """

    def __init__(self, model: TextModel, draft: TextModel, fixed: int | None = None):
        check_words(model.words, draft.words)
        self.model, self.draft, self.fixed, self.counts = model, draft, fixed, Speculation()
        self.words, self.positions, self.repeats = model.words, model.positions, model.repeats
        self._tokens: list[int] = []
        self._proposed: list[tuple[int, Logits]] = []  # tokens that may come, and the logits after each
        self._promised: list[float] = []

    @property
    def length(self) -> int:
        """How many tokens the text has."""
        return len(self._tokens)

    @property
    def read_bytes(self) -> int:
        """Bytes that the model has read."""
        return self.model.read_bytes

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """The logits after the last token."""
        if len(tokens) == 1:
            return self.step(tokens[0])
        self.cut(self.length)
        self._tokens += tokens
        return self.model.prefill(tokens)

    def scores(self, tokens: Sequence[int]) -> Float[np.ndarray, "tokens vocabulary"]:
        """The logits after each token."""
        self.cut(self.length)
        self._tokens += tokens
        return self.model.scores(tokens)

    def step(self, token: int) -> Logits:
        """The logits after one more token: known already if the draft proposed it."""
        self.counts.tokens += 1
        if self._proposed and self._proposed[0][0] == token:
            self._tokens.append(token)
            self.counts.accept(self._promised, len(self._promised) - len(self._proposed))
            return self._proposed.pop(0)[1]
        self.cut(self.length)
        self._tokens.append(token)
        return self._checked(token)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens at most, and nothing that was proposed."""
        del self._tokens[length:]
        self._proposed = []
        self.model.cut(self.length)
        self.draft.cut(self.length)

    def _checked(self, token: int) -> Logits:
        """The logits after a token. The pass computes those after the tokens that the draft proposes, too."""
        begun_s = time.perf_counter()
        proposed = self._propose()
        self.counts.draft_s += (drafted_s := time.perf_counter()) - begun_s
        first, *others = self.model.scores([token, *proposed]) if proposed else [self.model.step(token)]
        self._proposed = list(zip(proposed, others, strict=True))
        self.counts.check(self._promised)
        self.counts.check_s += time.perf_counter() - drafted_s
        return first

    def _propose(self) -> list[int]:
        positions = min(each.positions or sys.maxsize for each in (self.model, self.draft))
        proposal, tokens = Proposal(self.counts, positions - self.length, self.fixed), list[int]()
        given = self._tokens[self.draft.length :]
        while proposal.goes_on:
            logarithms = log_probabilities(self.draft.prefill(given))
            given = [int(logarithms.argmax())]
            tokens += given
            proposal.add(math.exp(logarithms[given[0]]))
        self._promised = proposal.promised
        return tokens


def check_words(words: int | None, of_draft: int | None) -> None:
    """Raise `UserError` for a draft of another vocabulary."""
    if words != of_draft:
        raise UserError(
            f"the draft has {of_draft} words, the model {words}: expected a packed copy of the same model, or a "
            "smaller model of the same vocabulary"
        )
