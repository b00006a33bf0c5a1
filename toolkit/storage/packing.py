"""Packing a model as a store: each decoder linear in every variant, and all other tensors as they are."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from toolkit.errors import UserError, unknown
from toolkit.formats import FORMATS, FormatError, Packed, decode, encode, expected_nbytes
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.head import HEAD, TILE, head_parts, linears_by_layer, rows_of_part, untied_head
from toolkit.models.plain import plain
from toolkit.models.skeleton import check_reopens
from toolkit.progress import progress
from toolkit.pruning.changed import ChangedModel
from toolkit.pruning.layerwise import Matrix
from toolkit.storage.writing import Op, write_store

Pack = Callable[[Tensor], Packed]
HEAD_ROWS = "head_rows"


def pack_model(
    model: nn.Module,
    folder: Path,
    variants: Mapping[str, Pack] | tuple[str, ...] = ("endor",),
    name: str = "unnamed",
    tokenizer: object | None = None,
    description: Mapping[str, object] | None = None,
    head: Pack | None = None,
) -> None:
    """Write a model into a new folder, with everything that `Store` and `transformers` need to run it again.

    Args:
        model: decoder-only, with plain linears (see `decoder_linears`). Prune it first, so that it becomes smaller.
        folder: must not exist.
        variants: names of formats, or a function that packs a weight for each variant (`Scaled.encode` for int8).
        name: the model's name, for people.
        tokenizer: stored beside the configuration, in the folder `model/`.
        description: how the model was made (method, sparsity), as plain JSON.
        head: packs the rows of the output head, which is streamed like layers then; None leaves it as it is, in memory.
            The model's head becomes what is packed, a matrix of its own.

    One layer in one variant is held in memory beside the model. Raises `UserError` as `check_reopens`,
    `write_store` and `encode` do.
    """
    packs = variants if isinstance(variants, Mapping) else {variant: _format(variant) for variant in variants}
    if not packs:
        raise UserError("no variant to pack: name at least one format, such as 'endor'")
    formats = () if isinstance(variants, Mapping) else variants
    described, expected = {"name": name, **(description or {})}, _expected_bytes(model, formats)
    _write_linears(model, folder, _ops(model, packs), tuple(packs), head, described, tokenizer, expected)


def pack_quantised(
    quantised: ChangedModel,
    folder: Path,
    variant: str,
    pack: Callable[[Matrix, torch.dtype], Packed],
    name: str = "unnamed",
    description: Mapping[str, object] | None = None,
    head: Pack | None = None,
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
    described, expected = {"name": name, **(description or {})}, sum(of.nbytes for of in quantised.statistics)
    _write_linears(quantised.model, folder, ops, (variant,), head, described, quantised.tokenizer, expected)


def _write_linears(
    model: nn.Module,
    folder: Path,
    ops: Iterable[Op],
    variants: Sequence[str],
    head: Pack | None,
    description: Mapping[str, object],
    tokenizer: object | None,
    expected_bytes: int,
) -> None:
    """Write a model from the `ops` of its decoder linears in each of the variants, and from parts of its head."""
    rows = None
    plain(model)
    if head:
        rows = rows_of_part(untied_head(model))
        ops, description = chain(ops, _head_ops(model, variants, head, rows)), {**description, HEAD_ROWS: rows}
    matrices, rest = len(variants) * sum(map(len, linears_by_layer(model, rows))), rest_tensors(model, rows)
    write_model(model, folder, ops, matrices, rest, description, tokenizer, expected_bytes=expected_bytes)


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


def rest_tensors(model: nn.Module, head_rows: int | None = None) -> dict[str, Tensor]:
    """All tensors of a model but the weights of its decoder linears, and of its head if that is cut into parts.

    A shared tensor is listed under its first name.
    """
    weights = [linear.weight for layer in linears_by_layer(model, None) for linear in layer.values()]
    return tensors_beside(model, [*weights, model.get_output_embeddings().weight] if head_rows else weights)


def head_rows(store_record: Mapping[str, object], folder: Path) -> int | None:
    """The rows of a part of the head by a store's record of the model. Raises `FormatError` for no number of rows."""
    rows = store_record.get(HEAD_ROWS)
    if rows is None or (isinstance(rows, int) and not isinstance(rows, bool) and rows >= TILE):
        return rows
    raise FormatError(f"{folder}: {HEAD_ROWS} is {rows!r:.99}; expected a number of rows, at least {TILE}")


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


def _head_ops(model: nn.Module, variants: Sequence[str], head: Pack, rows: int) -> Iterator[Op]:
    """Each part of the head, packed once; the model's head gets the weights that it decodes to."""
    for number, part in enumerate(head_parts(model, rows), len(decoder_blocks(model))):
        packed = head(part.weight.detach())
        part.weight.data.copy_(decode(packed))
        for variant in variants:
            yield Op.of(number, HEAD, variant, packed)


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
