"""A GGUF file as Python code uses it: `toolkit.open` gives it, and no torch is imported."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Float32

from toolkit import hub
from toolkit.errors import UserError, check_whole, unknown
from toolkit.models.gguf_tokenizer import read_tokenizer
from toolkit.offload.chat_template import named_ends
from toolkit.offload.decoder.decoder import Decoder
from toolkit.offload.decoder.model_file import ModelFile
from toolkit.offload.generation import Request, Writer
from toolkit.offload.sampling import Sampling
from toolkit.timeline import Timeline

TOKENS = 40  # that `generate_text` makes unless told otherwise, as `run` does


class OpenedFile(AbstractContextManager):
    """A Llama-shaped model that runs from its GGUF file; one thread uses it. `decoder` computes."""

    def __init__(self, file: ModelFile, decoder: Decoder):
        self.file, self.decoder = file, decoder
        ends = named_ends(*file.settings_of(decoder))
        self._writer = Writer(decoder, file.tokenizer, ends, decoder.cache.positions)

    def generate_text(self, prompt: str, tokens: int = TOKENS, **sampling: Any) -> str:
        """The text that follows a prompt: `tokens` of them, or fewer if the model ends it or the context is full.

        They are the likeliest ones; `sampling` are the fields of `Sampling`, such as `temperature=0.8, seed=1`. Raises
        `UserError` for other fields, for a prompt that is no text, has no token or fills the context, and for tokens
        that are no whole number from 1.
        """
        if not isinstance(prompt, str):
            raise UserError(f"prompt {prompt!r:.99}: expected a text")
        for name in sampling:
            if name not in Sampling.__dataclass_fields__:
                raise unknown("setting", name, Sampling.__dataclass_fields__)
        check_whole("tokens", tokens)
        with hub.foreign_code(self.file.header.file, "its tokenizer fails"):
            given = self.file.tokenizer(prompt)["input_ids"]
        if not given:
            raise UserError(f"prompt {prompt!r}: this model's tokenizer makes no token of it; give a word")
        request = Request(Sampling(**sampling), tokens)
        return "".join(piece.text for piece in self._writer.continued(given, request))

    def scores(self, tokens: Sequence[int]) -> Float32[np.ndarray, "tokens words"]:
        """The logits after each token of a text.

        Raises `UserError` for more tokens than the context has, for none, and for ids that the model does not have.
        """
        self._writer.forget()
        return self.decoder.scores(tokens)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer as transformers has it, which is imported then."""
        return read_tokenizer(self.file.header)

    @property
    def held(self) -> str:
        """The part of the weights that is in memory, and its bytes, in words."""
        return self.decoder.held

    @property
    def timeline(self) -> Timeline:
        """All reads and products since the model was opened."""
        return self.decoder.recorder.timeline()

    def __repr__(self) -> str:
        """The file, and what is in memory."""
        return f"<OpenedFile {str(self.file.header.file)!r}: {self.held}>"

    def _repr_html_(self) -> str:
        rows = {"from": self.file.header.file, "in memory": self.held, "so far": self.timeline}
        cells = (f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
        return f"<table>{''.join(cells)}</table>"

    def close(self) -> None:
        """Close the file and release the weights."""
        self.decoder.close()

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()
