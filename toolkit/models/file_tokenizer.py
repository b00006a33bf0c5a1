"""The tokenizer of a GGUF file by the package `tokenizers` alone, with transformers' interface for texts."""

from collections.abc import Mapping, Sequence
from typing import Any

SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class FileTokenizer:
    """The tokens, texts and conversations that transformers' tokenizer of the same file makes.

    `backend` is a `tokenizers.Tokenizer`. `settings` are what transformers would be called with: special tokens by
    their names, `chat_template`.
    """

    def __init__(self, backend: Any, settings: Mapping[str, Any]):
        self.backend, self.chat_template = backend, settings.get("chat_template")
        self.special_tokens_map = {name: settings[name] for name in SPECIAL if settings.get(name) is not None}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text's tokens, as `input_ids`."""
        return {"input_ids": self.backend.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self, tokens: Sequence[int], skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of tokens; spaces are never cleaned up."""
        return self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation. Raises whatever the template raises."""
        from toolkit.models.templates import rendered  # Jinja takes memory

        return rendered(self.chat_template, messages, add_generation_prompt, self.special_tokens_map)

    def convert_ids_to_tokens(self, number: int) -> str | None:
        """The token of an id, if there is one."""
        return self.backend.id_to_token(number)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self.backend.token_to_id(self.special_tokens_map.get("eos_token", ""))

    @property
    def all_special_ids(self) -> list[int | None]:
        """The ids of the special tokens that have names."""
        return [self.backend.token_to_id(token) for token in self.special_tokens_map.values()]

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Tokens that are no pieces of text, by their ids."""
        return self.backend.get_added_tokens_decoder()
