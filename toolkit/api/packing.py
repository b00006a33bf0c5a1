"""`toolkit.pack`: write a model packed."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.api.change import STORED
from toolkit.api.tokenizer import tokenizer_of
from toolkit.errors import UserError, unknown
from toolkit.files import path_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.formats import Packed
    from toolkit.quantization.spqr import Quantised
    from toolkit.storage.store import Store


def pack(
    model: "nn.Module | str | Path",
    out: str | Path,
    method: str | None = None,
    format: str | Sequence[str] | None = None,
    tokenizer: object | None = None,
    **options: object,
) -> "Store":
    """Write a model packed, into a new folder that `open` runs; return the folder as a `Store`.

    Args:
        model: a name, a folder, a GGUF file, or an id on the hub. It is pruned or quantised as by the command. Or a
            model in memory, which is written as it is.
        out: a folder that does not exist yet.
        method: of a name, a folder or a file alone: "wanda" if None; the command's `--help` lists the others.
        format: one or several of "endor", "csr", "two_four", "huffman", "zstd", "dense". None takes "endor", or
            "spqr" for a model in memory that `quantise` has just changed by SpQR.
        tokenizer: of a model in memory; None takes the one of the folder or file that it was loaded from.
        options: the other parameters of `toolkit.commands.pack.pack`, such as `sparsity=0.6`, `evaluate=False`.

    Raises `UserError` for a folder that exists, options that do not go together, too little disk, and logits of the
    written model that differ from the model's by more than rounding. Nothing is left behind then.
    """
    from toolkit.storage.store import Store

    if isinstance(model, str | Path):
        _pack_file(str(model), path_of(out), {"method": method, "format": format, **options})
    elif method or options:
        given = next(iter(({"method": method} if method else {}) | options))
        raise UserError(f"{given}: a model in memory is written as it is; call prune or quantise first, or name a file")
    else:
        _pack_as_it_is(model, path_of(out), (format,) if isinstance(format, str) else tuple(format or ()), tokenizer)
    return Store.open(out)


def _pack_file(model: str, out: Path, options: Mapping[str, object]) -> None:
    """Do what the command does. Raises `UserError` for an option that it does not have."""
    from toolkit.commands.pack import pack as pack_file

    known = [name for name in signature(pack_file).parameters if name not in ("model", "out")]
    if others := options.keys() - set(known):
        raise unknown("option", min(others), known)
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(formats := given.get("format"), str):
        given["format"] = [formats]
    print(pack_file(model, out, **given))


def _pack_as_it_is(model: "nn.Module", out: Path, formats: tuple[str, ...], tokenizer: object | None) -> None:
    """Write a model in memory, open what was written, and compare."""
    from toolkit.files import new_folder
    from toolkit.offload.logit_check import check_logits
    from toolkit.storage.packing import Linears, pack_model

    matrices = {} if formats else _spqr_matrices(model)
    layout = Linears({"spqr": _form_of(matrices, model.dtype)} if matrices else formats or ("endor",))
    with new_folder(out, made=False) as place:
        pack_model(model, place, layout, type(model).__name__, tokenizer or tokenizer_of(model))
        check_logits(place, model)


def _spqr_matrices(model: "nn.Module") -> "dict[int, Quantised]":
    """By place in memory, the matrices of a model that `quantise` has changed by SpQR and nobody has changed since."""
    from toolkit.models import decoder_blocks, decoder_linears
    from toolkit.quantization.spqr import Quantised

    found = {}
    for linear in (linear for block in decoder_blocks(model) for linear in decoder_linears(block).values()):
        matrix, version = getattr(linear, STORED, None) or (None, None)
        if not isinstance(matrix, Quantised) or version != linear.weight._version:
            return {}
        found[linear.weight.data_ptr()] = matrix
    return found


def _form_of(matrices: "Mapping[int, Quantised]", dtype: "torch.dtype") -> "Callable[[Tensor], Packed]":
    """Finds the stored form of a weight."""
    from toolkit.formats.spqr import fastest

    return lambda weight: fastest(matrices[weight.data_ptr()], dtype)
