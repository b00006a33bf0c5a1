"""Ids of tokens that a model does not have: they are refused in one line, which names the token.

A tokenizer can have more tokens than its model, such as a token for padding that somebody added.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from toolkit.errors import UserError

if TYPE_CHECKING:  # it takes a second and 140 MB
    from torch import Tensor


def check_vocabulary(ids: "Tensor", words: int, tokenizer: Callable[[], object] | None = None) -> None:
    """Raise `UserError` for an id outside 0 to `words` - 1, and for ids that are no integers. `ids` have any shape.

    `tokenizer` gives the text's tokenizer, which names the token; it is called for an error only.
    """
    if ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise UserError(f"token ids of {ids.dtype}: expected integers, as a tokenizer gives them")
    if ids.numel() == 1:  # a token of a text, which comes thousands of times
        check_known(int(ids), int(ids), words, tokenizer)
    elif ids.numel():
        least, most = map(int, ids.aminmax())
        check_known(least, most, words, tokenizer)


def check_known(least: int, most: int, words: int, tokenizer: Callable[[], object] | None = None) -> None:
    """The same for ids of which the least and the largest are given."""
    if not 0 <= least <= most < words:
        number = most if least >= 0 else least
        raise UserError(
            f"{_named(number, tokenizer)} is unknown to the model, which has ids 0 to {words - 1}: take another token, "
            "or the tokenizer that belongs to the model"
        )


def _named(number: int, tokenizer: Callable[[], object] | None) -> str:
    try:
        token = tokenizer().convert_ids_to_tokens(number) if tokenizer else None  # type: ignore[attr-defined]
    except (UserError, ValueError, OverflowError, IndexError):  # there is no tokenizer, or it lacks the id as well
        token = None
    return f"token id {number}" if token is None else f"token {token!r:.99} (id {number})"
