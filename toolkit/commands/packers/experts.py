"""The packer that stores each expert of a mixture by itself, for `run` to read those that a token needs."""

import argparse

from toolkit.commands.packers.packer import WRITTEN, Option, Packer, torch_dtype
from toolkit.errors import unknown

BITS = (16, 4, 2)


def pack(options: argparse.Namespace) -> tuple:
    """Store the model's experts, each by itself; return the model, and its tokenizer."""
    from toolkit.models import load_model
    from toolkit.storage.experts import pack_experts

    model, tokenizer = load_model(options.model, torch_dtype(options.dtype or WRITTEN))
    bits = None if options.bits == BITS[0] else options.bits
    pack_experts(model, options.out, options.model, tokenizer, bits)
    return model, tokenizer


def check(options: argparse.Namespace) -> None:
    """Raise `UserError` for bits that experts are not stored in."""
    if options.bits not in BITS:
        raise unknown("--bits", options.bits, BITS)


PACKER = Packer(
    "experts",
    "store each expert of a mixture of experts by itself",
    pack,
    (Option("bits", 16, "of an expert's weight: 16, or 4 in groups of 64, or 2 in groups of 16", {"type": int}),),
    check,
)
