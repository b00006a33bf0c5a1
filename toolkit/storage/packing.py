"""Packing a model as a store: each decoder linear in every variant, and all other tensors as they are."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from toolkit.errors import UserError, unknown
from toolkit.formats import FORMATS, Packed, encode, expected_nbytes
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.skeleton import check_reopens
from toolkit.progress import progress
from toolkit.quantization.layerwise import Matrix
from toolkit.quantization.quantised import QuantisedModel
from toolkit.storage.writing import Op, write_store

Pack = Callable[[Tensor], Packed]


def pack_model(
    model: nn.Module,
    folder: Path,
    variants: Mapping[str, Pack] | tuple[str, ...] = ("endor",),
    name: str = "unnamed",
    tokenizer: object | None = None,
    description: Mapping[str, object] | None = None,
) -> None:
    """Write a model into a new folder, with everything that `Store` and `transformers` need to run it again.

    Args:
        model: decoder-only, with plain linears (see `decoder_linears`). Prune it first, so that it becomes smaller.
        folder: must not exist.
        variants: names of formats, or a function that packs a weight for each variant (`Scaled.encode` for int8).
        name: the model's name, for people.
        tokenizer: stored beside the configuration, in the folder `model/`.
        description: how the model was made (method, sparsity), as plain JSON.

    One layer in one variant is held in memory beside the model. Raises `UserError` as `check_reopens`,
    `write_store` and `encode` do.
    """
    packs = variants if isinstance(variants, Mapping) else {variant: _format(variant) for variant in variants}
    if not packs:
        raise UserError("no variant to pack: name at least one format, such as 'endor'")
    formats = () if isinstance(variants, Mapping) else variants
    matrices = len(packs) * sum(len(decoder_linears(block)) for block in decoder_blocks(model))
    described = {"name": name, **(description or {})}
    expected = _expected_bytes(model, formats)
    write_model(
        *(model, folder, _ops(model, packs), matrices, rest_tensors(model), described, tokenizer),
        expected_bytes=expected,
    )


def pack_quantised(
    quantised: QuantisedModel,
    folder: Path,
    variant: str,
    pack: Callable[[Matrix, torch.dtype], Packed],
    name: str = "unnamed",
    description: Mapping[str, object] | None = None,
) -> None:
    """Write a quantised model into a new folder, as `pack_model` does.

    `pack` makes the stored form of a quantised matrix, for a weight of the model's type. `variant` names what comes of
    it; its matrices may have different formats. One layer is held in memory beside the model. Raises `UserError` as
    `check_reopens` and `write_store` do.
    """
    ops = (
        Op.of(number, op, variant, pack(matrix, quantised.model.dtype))
        for number in range(len(quantised.folders))
        for op, matrix in quantised.matrices(number).items()
    )
    described = {"name": name, **(description or {})}
    expected = sum(record.nbytes for record in quantised.statistics)
    model, matrices = quantised.model, len(quantised.statistics)
    rest = rest_tensors(model)
    write_model(model, folder, ops, matrices, rest, described, quantised.tokenizer, expected_bytes=expected)


def write_model(
    model: nn.Module,
    folder: Path,
    ops: Iterable[Op],
    count: int,
    rest: Mapping[str, Tensor],
    description: Mapping[str, object],
    tokenizer: object | None = None,
    *,
    expected_bytes: int = 0,
    unit: str = "matrices",
    config: object | None = None,
    files: Callable[[Path], None] | None = None,
) -> None:
    """Write the store of a model from its `ops`, one for each of `count` units, and its other tensors `rest`.

    `config` takes the place of the model's configuration. `files` adds small files to the folder `model/`.
    `expected_bytes` are those of the ops. Raises `UserError` as `check_reopens` and `write_store` do.
    """
    check_reopens(model)

    def write_files(place: Path) -> None:
        for part in (config or model.config, getattr(model, "generation_config", None), tokenizer):
            if part is not None:
                part.save_pretrained(place)
        if files is not None:
            files(place)

    with progress("packing", count, unit) as bar:
        expected_bytes += sum(tensor.nbytes for tensor in rest.values())
        write_store(folder, _counted(ops, bar), rest.items(), description, write_files, expected_bytes)


def _counted(ops: Iterable[Op], bar: tqdm) -> Iterator[Op]:
    for op in ops:
        yield op
        bar.update()


def rest_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model but the weights of its decoder linears. A shared tensor is listed under its first name."""
    return tensors_beside(
        model, (linear.weight for block in decoder_blocks(model) for linear in decoder_linears(block).values())
    )


def tensors_beside(model: nn.Module, weights: Iterable[Tensor]) -> dict[str, Tensor]:
    """All tensors of a model but these weights. A shared tensor is listed under its first name."""
    packed = {id(weight) for weight in weights}
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in packed:
            packed.add(id(tensor))
            found[name] = tensor
    return found


def _format(name: str) -> Pack:
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return lambda weight: encode(name, weight)


def _ops(model: nn.Module, packs: Mapping[str, Pack]) -> Iterator[Op]:
    for number, block in enumerate(decoder_blocks(model)):
        for variant, pack in packs.items():
            for name, linear in decoder_linears(block).items():
                yield Op.of(number, name, variant, pack(linear.weight.detach()))


def _expected_bytes(model: nn.Module, formats: Collection[str]) -> int:
    """The bytes that these formats will take, as far as they can be known beforehand."""
    total = 0
    for block in decoder_blocks(model) if formats else ():
        for linear in decoder_linears(block).values():
            weight = linear.weight
            sparsity = 1 - int(torch.count_nonzero(weight)) / max(weight.numel(), 1)
            for name in formats:
                with contextlib.suppress(UserError):  # sizes of codecs depend on the values
                    total += expected_nbytes(name, tuple(weight.shape), sparsity, weight.dtype)
    return total
