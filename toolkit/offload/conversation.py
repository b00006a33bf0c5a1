"""A conversation with a model: turns go through its chat template, and only new tokens are computed.

    conversation = Conversation(writer, system="Answer briefly.")
    for piece in conversation.ask("What is a cache?", Request(most=100)):
        print(piece.text, end="")

A template may write earlier turns differently once more follow, for example without the model's thoughts. The writer
computes from the first token that differs then. A model without a template continues plain text.
"""

from collections.abc import Callable, Iterator

from toolkit import hub
from toolkit.offload.chat_template import has_template, tokens_of
from toolkit.offload.generation import Request, TextPiece, Writer


class Conversation:
    """The messages so far, each with `role` and `content`, and the model that answers them.

    `tokens` is how many tokens the last question's text and its answer have.
    """

    def __init__(self, writer: Writer, system: str | None = None):
        self._writer, self._system = writer, system
        self.templated = has_template(writer.tokenizer)
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's, and the key-value cache."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.tokens = 0
        self._writer.forget()

    def ask(
        self, question: str, request: Request, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[TextPiece]:
        """The pieces of the answer to one more message of the user. A cancelled answer stays as far as it came; the
        message goes with one that did not begin.

        Raises `UserError` for a text that fills the context, and for messages that the template refuses. The
        conversation stays as it was then.
        """
        before, answer, end = list(self.messages), "", ""
        self.messages = [*before, {"role": "user", "content": question}]
        try:
            prompt = self._prompt()
            self.tokens = len(prompt)
            for piece in self._writer.continued(prompt, request, cancelled):
                answer, end = answer + piece.text, piece.end
                self.tokens += piece.token is not None
                yield piece
        except BaseException:
            self.messages = before
            raise
        if answer or end != "cancelled":
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages = before

    def _prompt(self) -> list[int]:
        if self.templated:
            return tokens_of(self._writer.tokenizer, self.messages)
        with hub.foreign_code("the tokenizer of the model", "it fails"):
            return self._writer.tokenizer("\n".join(it["content"] for it in self.messages))["input_ids"]
