"""The packer that keeps all weights and stores FFNs by neuron, for `run` to read those that a token needs."""

import argparse

from toolkit.commands.packers.packer import Option, Packer, calibration, torch_dtype
from toolkit.errors import unknown
from toolkit.sparsity import resolve

PREDICTORS = ("few_bits", "low_rank", "gate", "none")


def pack(options: argparse.Namespace) -> tuple:
    """Store the model's FFNs by neuron; return the model, and its tokenizer."""
    from toolkit.offload.neuron_folder import make_folder

    settings = (options.sparsity, options.predictors, calibration(options), torch_dtype(options.dtype))
    return make_folder(options.model, options.out, *settings)


def check(options: argparse.Namespace) -> None:
    """Raise `UserError` for a sparsity or predictors that cannot be."""
    resolve(options.sparsity, None)
    if options.predictors not in PREDICTORS:
        raise unknown("predictors", options.predictors, PREDICTORS)


PACKER = Packer(
    "neurons",
    "keep all weights, and store FFNs by neuron",
    pack,
    (
        Option("sparsity", 0.8, "share of zeros", {"type": float}),
        Option("predictors", "few_bits", f"which neurons to read before an FFN: {', '.join(PREDICTORS)}"),
    ),
    check,
)
