"""The packer that stores each expert of a mixture by itself, for `run` to read those that a token needs."""

import argparse

from toolkit.commands.packers.packer import WRITTEN, Option, Packer, torch_dtype
from toolkit.errors import UserError, unknown

BITS = (16, 4, 2)


def pack(options: argparse.Namespace) -> tuple:
    """Store the model's experts, each by itself; return the model, and its tokenizer."""
    from toolkit.models import load_model
    from toolkit.storage.experts import pack_experts

    model, tokenizer = load_model(options.model, torch_dtype(options.dtype or WRITTEN))
    bits = None if options.bits == BITS[0] else options.bits
    if options.mixed:
        bits = _by_usage(options, model, tokenizer)
    pack_experts(model, options.out, options.model, tokenizer, bits)
    return model, tokenizer


def _by_usage(options: argparse.Namespace, model, tokenizer) -> list[list[int]]:
    """The bits of each expert of each layer, by the calibration text's routing."""
    from toolkit.activations.routing import record_routing
    from toolkit.activations.statistics import usage_of
    from toolkit.policies.expert_bits import bits_by_usage
    from toolkit.text import load_tokens

    tokens = load_tokens(options.corpus, tokenizer, "calibration")
    trace = record_routing(model, options.model, tokens, options.corpus, options.windows, options.sequence_length)
    return bits_by_usage([usage_of(trace, layer).numpy() for layer in range(trace.layers)], options.mixed, options.bits)


def check(options: argparse.Namespace) -> None:
    """Raise `UserError` for bits that experts are not stored in, or what is no share of them."""
    if options.bits not in BITS:
        raise unknown("--bits", options.bits, BITS)
    if not 0 <= options.mixed <= 1:
        raise UserError(f"--mixed {options.mixed}: expected a share of a layer's experts, from 0 to 1")
    if options.mixed and options.bits != 4:
        raise UserError(f"--mixed {options.mixed} with --bits {options.bits}: give --bits 4, which the others have")


PACKER = Packer(
    "experts",
    "store each expert of a mixture of experts by itself",
    pack,
    (
        Option("bits", 16, "of an expert's weight: 16, or 4 in groups of 64, or 2 in groups of 16", {"type": int}),
        Option(
            "mixed",
            0.0,
            "share of each layer's experts, least used by the calibration text, in 2 bits",
            {"type": float},
        ),
    ),
    check,
)
