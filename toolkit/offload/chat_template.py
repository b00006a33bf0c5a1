"""A model's own chat template: a conversation becomes the text that the model was trained to continue.

transformers renders the template in Jinja's sandbox: it comes with the model, and anyone may have written it.
"""

from collections.abc import Sequence
from typing import Any

from toolkit import hub
from toolkit.errors import UserError

PLACE = "the chat template of the model"
MARK = "toolkit-answer"


def has_template(tokenizer: Any) -> bool:
    """Whether the model's file or folder has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def tokens_of(tokenizer: Any, messages: Sequence[dict[str, str]], answering: bool = True) -> list[int]:
    """The token ids of a conversation; with `answering`, up to where the model's next answer begins.

    `messages` have a `role` (system, user, assistant) and a `content`. Raises `UserError` for a template that refuses
    them, with its own words.
    """
    with hub.foreign_code(PLACE, "it cannot be used"):
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answering)
        return tokenizer(text, add_special_tokens=False)["input_ids"]


def end_of_turn(tokenizer: Any) -> set[int]:
    """The special tokens that the template puts behind an answer, such as `<|im_end|>`; none without a template."""
    if not has_template(tokenizer):
        return set()
    messages = [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
    try:
        with hub.foreign_code(PLACE):
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            behind = tokenizer(text.rpartition(MARK)[2], add_special_tokens=False)["input_ids"]
    except UserError:  # it will say so when it is used
        return set()
    return {token for token in behind[:1] if token in tokenizer.all_special_ids or _is_control(tokenizer, token)}


def _is_control(tokenizer: Any, token: int) -> bool:
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(token)
    return bool(added and added.special)


def ends_of(tokenizer: Any, *settings: Any) -> set[int]:
    """The tokens by which a model ends a text or an answer: those of its settings, its tokenizer and its template.

    `settings` are configurations of transformers with `eos_token_id`: a number, a list, or None.
    """
    return named_ends(*settings, tokenizer) | end_of_turn(tokenizer)


def named_ends(*settings: Any) -> set[int]:
    """The tokens that settings name as ends of a text."""
    given = [getattr(part, "eos_token_id", None) for part in settings]
    numbers = {number for one in given for number in (one if isinstance(one, list | tuple) else [one])}
    return {number for number in numbers if number is not None}
