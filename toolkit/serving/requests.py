"""Requests of OpenAI's interface: what they may hold, checked; what this server does not do is refused by name."""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from toolkit.errors import UserError
from toolkit.offload.generation import Request
from toolkit.offload.sampling import SEEDS, Sampling

MOST_STOPS, MOST_PROMPTS, MOST_LIKELIEST = 16, 128, 20
HARMLESS = {  # fields that change no text
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
    *("add_special_tokens", "return_tokens_as_token_ids", "timeout"),
}
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # others, and the values with which they have no effect
    "n": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "echo": (None, False),
    "modalities": (None, ["text"]),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
}
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Likeliest = Annotated[int, Field(ge=0, le=MOST_LIKELIEST)]


class _Common(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Refuse fields that are not done here, unless they change no text."""
        for name in given.keys() - cls.model_fields.keys() - HARMLESS if isinstance(given, dict) else ():
            if given[name] not in UNSUPPORTED.get(name, (None,)):
                raise ValueError(f"{name:.99} is not supported: leave it out")
        return given

    def with_usage(self) -> bool:
        """Whether a streamed answer ends with its numbers of tokens."""
        return bool(self.stream and (self.stream_options or {}).get("include_usage"))

    def wanted(self, most: int | None, likeliest: int | None) -> Request:
        """How texts are continued. OpenAI's defaults: temperature 1, and a new seed for each request."""
        seed = secrets.randbelow(SEEDS) if self.seed is None else self.seed % SEEDS
        temperature = 1.0 if self.temperature is None else self.temperature
        sampling = Sampling(temperature, self.top_k or 0, 1.0 if self.top_p is None else self.top_p, seed)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return Request(sampling, most, tuple(stops), likeliest)


class CompletionRequest(_Common):
    """The body of `/v1/completions`. A prompt is a text or token ids, or a list of either."""

    prompt: str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Likeliest | None = None
    echo: bool | None = None

    def prompts(self) -> Sequence[Any]:
        """One or more, each a text or token ids."""
        alone = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if alone else self.prompt

    def request(self) -> Request:
        """How each prompt is continued."""
        return self.wanted(self.max_tokens, self.logprobs)


class TextPart(BaseModel):
    """A part of a message: text alone."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    role: Annotated[str, StringConstraints(max_length=50)]
    content: str | list[TextPart]

    def as_text(self) -> dict[str, str]:
        """Role and content, as a template takes them. OpenAI's newer name for `system` is `developer`."""
        whole = isinstance(self.content, str)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content if whole else "".join(part.text for part in self.content)}


class ChatRequest(_Common):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None

    def request(self) -> Request:
        """How the answer is made."""
        likeliest = (self.top_logprobs or 0) if self.logprobs else None
        return self.wanted(self.max_completion_tokens or self.max_tokens, likeliest)


def parsed(kind: type[_Common], body: bytes) -> Any:
    """The request that a body holds. Raises `UserError` that names the field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise UserError(_words_of(error)) from None
    except RecursionError:
        raise UserError("the body: it is nested too deeply") from None


def _words_of(error: ValidationError) -> str:
    """The fault in words: of a value that may have several types, by the one that it comes nearest to."""
    fault = max(error.errors(include_url=False), key=lambda it: (not it["type"].endswith("_type"), len(it["loc"])))
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    # a part that names a type, such as list[int], is no place in the body
    place = ".".join(
        str(part) for part in fault["loc"] if isinstance(part, int) or (part.isidentifier() and part != "str")
    )
    return f"{place or 'the body'}: {fault['msg']}"
