"""The text of tokens as they come, in whole characters.

words = Words(tokenizer.decode, prompt[-LEAD:])
print(words.add(token), end="")
print(words.rest())
"""

from collections.abc import Callable, Collection, Sequence

LEAD = 8  # tokens of the prompt by which the text of the first new one is spaced
BROKEN = "\N{REPLACEMENT CHARACTER}"  # the end of a text whose last character lacks some of its bytes


class Words:
    """The text of tokens that come one by one: whole characters, and nothing that may begin a stop text.

    `decode` gives the text of several tokens, without special ones. `lead` are the last tokens of the prompt.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], lead: Sequence[int], stops: Collection[str] = ()):
        self._decode, self._tokens, self._stops = decode, list(lead), stops
        self._begin, self._end = 0, len(lead)  # of the tokens whose text was taken last
        self._held, self.stopped = "", False

    def add(self, token: int) -> str:
        """The text that is certain after one more token."""
        self._tokens.append(token)
        text = self._decoded(self._begin, None)
        if text.endswith(BROKEN):
            return ""
        new = text[len(self._decoded(self._begin, self._end)) :]
        self._begin, self._end = self._end if new else self._begin, len(self._tokens)  # a special token has no text
        return self._certain(self._held + new)

    def rest(self) -> str:
        """The text that was held back, at the end; none if a stop text ended it."""
        if self.stopped:
            return ""
        left = self._decoded(self._begin, None)[len(self._decoded(self._begin, self._end)) :]
        self._end, text = len(self._tokens), self._held + left
        self._held = ""
        return self._certain(text) + self._held

    def _certain(self, text: str) -> str:
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        begun = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]

    def _decoded(self, begin: int, end: int | None) -> str:
        return self._decode(self._tokens[begin:end])


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text with which a stop text begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
