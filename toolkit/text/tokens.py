"""Token ids as they come from tokenizers and files, of one type."""

import torch
from jaxtyping import Int64
from torch import Tensor

from toolkit.errors import UserError

INTEGERS = {
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip


def token_ids(tokens: object, name: str = "tokens") -> Int64[Tensor, " n"]:
    """A row of token ids as int64, which embeddings take; any integer type may come in.

    Raises `UserError` that says what it is, for anything but a tensor of integers with one dimension.
    """
    if not isinstance(tokens, Tensor):
        raise UserError(f"{name} is of type {type(tokens).__name__}; expected a tensor of token ids, int64 [n]")
    if tokens.ndim != 1 or tokens.dtype not in INTEGERS:
        raise UserError(f"{name} is {tokens.dtype} {list(tokens.shape)}; expected token ids, int64 [n]")
    return tokens.long()
