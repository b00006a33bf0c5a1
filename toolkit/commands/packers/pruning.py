"""Packers that prune, or keep the weights as they are, and write them in one or several formats."""

import argparse
from collections.abc import Callable

from toolkit.commands.packers.packer import WRITTEN, Option, Packer, calibration, torch_dtype
from toolkit.errors import UserError, unknown
from toolkit.sparsity import resolve

SPARSE_BITMASK = "sparse-bitmask"
FORMATS = {
    "endor": "non-zeros and a bitmap (default); the only one of these that is also multiplied packed",
    "csr": "non-zeros with their column numbers",
    "two_four": "two non-zeros of four, for --pattern 2:4",
    "zstd": "the dense bytes, compressed",
    "lz4": "the dense bytes, compressed more quickly and less",
    "dense": "the dense bytes, to compare with",
    SPARSE_BITMASK: "a checkpoint of its own, in the layout of compressed-tensors 0.9 to 0.14, which reads it with "
    "transformers 4; transformers 5 does not. `run` loads it whole, without a memory budget",
}


def pack(options: argparse.Namespace) -> tuple:
    """Prune the model and write it; return it as it was written, and its tokenizer."""
    from toolkit.models.blocks import cast_parameters
    from toolkit.pruning import load_pruned
    from toolkit.quantization.smoothed import load_smoothed

    if options.method != "dense" and SPARSE_BITMASK not in options.format:
        _try_formats(options)
    load = load_smoothed if options.int8 else load_pruned
    settings = {"sparsity": options.sparsity, "pattern": options.pattern, "calibration": calibration(options)}
    unchanged = options.method == "dense" and not options.int8  # nothing is computed
    dtype = torch_dtype(options.dtype or (WRITTEN if unchanged else None))
    model, tokenizer, *_ = load(options.model, options.method, **settings, dtype=dtype)
    cast_parameters(model, torch_dtype(options.dtype or WRITTEN))
    _write(options, model, tokenizer)
    return model, tokenizer


def check(options: argparse.Namespace) -> None:
    """Raise `UserError` for a sparsity, a pattern or formats that cannot be."""
    resolve(options.sparsity, options.pattern)
    for name in options.format:
        if name.startswith("spqr"):
            raise UserError(f"--format {name}: its weights are quantised; use --method spqr without --format")
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    if SPARSE_BITMASK in options.format and len(options.format) > 1:
        raise UserError(f"--format {SPARSE_BITMASK} makes a folder of its own: pack the other formats into another one")
    if options.int8 and SPARSE_BITMASK in options.format:
        raise UserError(f"--int8: {SPARSE_BITMASK} has no place for scales; pack endor, zstd or dense instead")


def _try_formats(options: argparse.Namespace) -> None:
    """Pack a small matrix as the model will be, so that a format that cannot hold it is refused before the work."""
    import torch

    from toolkit.pruning import METHODS

    sparsity, pattern = resolve(options.sparsity, options.pattern)
    weight = METHODS["magnitude"](torch.rand(64, 64) + 1, None, sparsity, pattern)
    for name in options.format:
        try:
            _encoder(options, name)(weight)
        except UserError as error:
            hint = "; add --pattern 2:4" if options.pattern is None else ""
            raise UserError(f"--format {name} cannot hold weights pruned like this: {error}{hint}") from error


def _encoder(options: argparse.Namespace, name: str) -> Callable:
    from functools import partial

    from toolkit.formats import encode
    from toolkit.formats.scaled import Scaled

    return partial(Scaled.encode if options.int8 else encode, name)


def _write(options: argparse.Namespace, model, tokenizer) -> None:
    from toolkit.interchange import save_model
    from toolkit.storage.packing import pack_model

    if options.format == [SPARSE_BITMASK]:
        save_model(model, options.out, tokenizer)
        return
    recipe = {name: getattr(options, name) for name in ("method", "sparsity", "pattern", "int8")}
    variants = {name: _encoder(options, name) for name in options.format}
    pack_model(model, options.out, variants, options.model, tokenizer, recipe)


OPTIONS = (
    Option("sparsity", 0.5, "share of zeros", {"type": float}),
    Option("pattern", None, "N:M instead, such as 2:4"),
    Option("format", ["endor"], "one or several; see below", {"nargs": "+"}),
    Option("int8", False, "decoder weights in int8, smoothed by SmoothQuant first", {"action": "store_true"}),
)
METHODS = {
    "wanda": "prune by weight times norm of its input (default)",
    "magnitude": "prune by weight, without calibration",
    "sparsegpt": "prune and make up for the error in the other weights",
    "dense": "do not prune",
}
PACKERS = tuple(Packer(name, help, pack, OPTIONS, check) for name, help in METHODS.items())
