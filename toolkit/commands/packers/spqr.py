"""The packer that quantises by SpQR."""

import argparse

from toolkit.commands.packers.packer import WRITTEN, Option, Packer, calibration, torch_dtype
from toolkit.errors import UserError


def pack(options: argparse.Namespace) -> tuple:
    """Quantise the model and write it; return it as it was written, and its tokenizer."""
    from toolkit.formats.spqr import fastest
    from toolkit.models.blocks import cast_parameters
    from toolkit.quantization.quantised import load_quantised
    from toolkit.quantization.spqr import SpQR
    from toolkit.storage.packing import pack_quantised

    dtype = torch_dtype(options.dtype)
    quantised = load_quantised(options.model, SpQR(options.outliers), calibration(options), dtype)
    cast_parameters(quantised.model, dtype or torch_dtype(WRITTEN))
    recipe = {name: getattr(options, name) for name in ("method", "outliers")}
    pack_quantised(quantised, options.out, "spqr", fastest, options.model, recipe)
    return quantised.model, quantised.tokenizer


def check(options: argparse.Namespace) -> None:
    """Raise `UserError` for a share of outliers that cannot be."""
    if not 0 <= options.outliers <= 1:
        raise UserError(f"--outliers {options.outliers}: expected a share of the weights from 0 to 1, such as 0.01")


PACKER = Packer(
    "spqr",
    "quantise to 3 bits by SpQR",
    pack,
    (Option("outliers", 0.01, "share of weights kept in fp16", {"type": float}),),
    check,
    resumable=True,
)
