"""Answers of OpenAI's interface, made from the pieces of a text."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from toolkit.offload.generation import Score, TextPiece

REPLACEMENT = "\ufffd"  # stands for bytes that are no character
REASONS = {"stop": "stop", "length": "length", "context": "length"}


@dataclass
class Answer:
    """The frame of an answer: the model's name, the endpoint's kind, and the numbers of tokens so far."""

    model: str
    chat: bool
    tokenizer: Any
    prompt_tokens: int = 0
    new_tokens: int = 0
    reached: dict[int, int] = field(default_factory=dict)  # characters of each text that had their scores
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    def whole(self, texts: Sequence[tuple[str, list[tuple[int, Score | None]], str]], scored: bool) -> dict[str, Any]:
        """The whole answer: of each prompt the text, its tokens with their scores, and why it ends."""
        choices = [
            {
                "index": index,
                "finish_reason": REASONS.get(end),
                "logprobs": self._scores(index, tokens) if scored else None,
            }
            | ({"message": {"role": "assistant", "content": text}} if self.chat else {"text": text})
            for index, (text, tokens, end) in enumerate(texts)
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._frame(kind) | {"choices": choices, "usage": self.usage()}

    def chunk(self, index: int, piece: TextPiece, scored: bool, first: bool, usage: bool) -> dict[str, Any]:
        """One piece of a streamed answer."""
        scores = self._scores(index, [(piece.token, piece.score)]) if scored and piece.token is not None else None
        role = {"role": "assistant"} if first else {}
        content = {"delta": role | {"content": piece.text}} if self.chat else {"text": piece.text}
        choice = {"index": index, "finish_reason": REASONS.get(piece.end), "logprobs": scores} | content
        return self._chunks([choice], usage, None)

    def last_chunk(self) -> dict[str, Any]:
        """The chunk without text that has the numbers of tokens."""
        return self._chunks([], True, self.usage())

    def usage(self) -> dict[str, int]:
        """The numbers of tokens."""
        total = self.prompt_tokens + self.new_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens, "total_tokens": total}

    def text_of(self, token: int) -> str:
        """A token by itself, special ones by their names."""
        return self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _chunks(self, choices: list[dict[str, Any]], with_usage: bool, usage: dict[str, int] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._frame(kind) | {"choices": choices} | ({"usage": usage} if with_usage else {})

    def _frame(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.name}", "object": kind, "created": self.created, "model": self.model}

    def _scores(self, index: int, tokens: Sequence[tuple[int, Score | None]]) -> dict[str, Any]:
        return {"content": [self._scored(*token) for token in tokens]} if self.chat else self._columns(index, tokens)

    def _scored(self, token: int, score: Score) -> dict[str, Any]:
        """An entry of a conversation's scores."""
        best = [self._named(*pair) for pair in score.likeliest]
        return self._named(token, score.logarithm) | {"top_logprobs": best}

    def _named(self, token: int, logarithm: float) -> dict[str, Any]:
        text = self.text_of(token)
        is_part = REPLACEMENT in text  # of a character whose other bytes are in the next tokens
        return {"token": text, "logprob": logarithm, "bytes": None if is_part else list(text.encode())}

    def _columns(self, index: int, tokens: Sequence[tuple[int, Score | None]]) -> dict[str, Any]:
        """The scores of a completion. Its first token has none; two tokens of one text share the larger one.

        Offsets go on from those of the pieces before.
        """
        names = [self.text_of(token) for token, _ in tokens]
        *offsets, self.reached[index] = accumulate(map(len, names), initial=self.reached.get(index, 0))
        best: list[dict[str, float] | None] = []
        for name, (_, score) in zip(names, tokens, strict=True):
            pairs = [] if score is None else [(self.text_of(at), value) for at, value in reversed(score.likeliest)]
            best.append(None if score is None else {name: score.logarithm} | dict(pairs))
        logarithms = [None if score is None else score.logarithm for _, score in tokens]
        return {"tokens": names, "token_logprobs": logarithms, "top_logprobs": best, "text_offset": offsets}
