"""Packing a model as a store: some weights as ops of a layout, and all other tensors as they are.

pack_model(model, folder, Linears(("endor", "dense")), "smollm2-135m", tokenizer)
pack_model(model, folder, Neurons(thresholds), "smollm2-135m", tokenizer)       # of toolkit.storage.neuron_packing
pack_model(model, folder, WholeExperts(bits=4), "mixtral", tokenizer)           # of toolkit.storage.experts
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit import hub
from toolkit.errors import UserError, unknown
from toolkit.formats import FORMATS, Packed, decode, encode, expected_nbytes
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.head import HEAD, head_parts, linears_by_layer, rows_of_part, untied_head
from toolkit.models.plain import plain
from toolkit.models.skeleton import check_head_alone, check_reopens
from toolkit.progress import progress
from toolkit.sparsity.changed import ChangedModel
from toolkit.sparsity.layerwise import Matrix
from toolkit.storage.writing import Op, write_store

Pack = Callable[[Tensor], Packed]
HEAD_ROWS = "head_rows"


class Layout(ABC):
    """How weights of decoder blocks are stored in a folder, in one or more variants. The default: linears."""

    @property
    @abstractmethod
    def variants(self) -> Sequence[str]:
        """The names of the variants."""

    @abstractmethod
    def ops(self, model: nn.Module) -> Iterator[Op]:
        """The ops, layer by layer. One layer in one variant is held in memory beside the model."""

    def check(self, model: nn.Module) -> None:  # noqa: B027 (a layout may hold any model)
        """Raise `UserError` for a model that this layout does not hold, or settings that do not fit it."""

    def weights(self, model: nn.Module) -> list[Tensor]:
        """The model's tensors that the ops hold."""
        return linear_weights(model)

    def expected_bytes(self, model: nn.Module) -> int:
        """The bytes that the ops will take, as far as they are known beforehand."""
        return sum(weight.nbytes for weight in self.weights(model))

    def about(self, model: nn.Module) -> Mapping[str, object]:
        """The facts of the index on the model beside its name, as plain JSON."""
        return {}

    def config(self, model: nn.Module):
        """The configuration that is stored."""
        return model.config


@dataclass(frozen=True)
class Linears(Layout):
    """Each decoder linear by itself, for layers that are streamed whole.

    `forms` are names of formats, or a function that packs a weight for each variant (`Scaled.encode` for int8).
    """

    forms: Mapping[str, Pack] | tuple[str, ...] = ("endor",)

    @property
    def variants(self) -> Sequence[str]:
        """The names of the variants."""
        return tuple(self.forms)

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` for an unknown format, or none."""
        if not self.forms:
            raise UserError("no variant to pack: name at least one format, such as 'endor'")
        for name in () if isinstance(self.forms, Mapping) else self.forms:
            if name not in FORMATS:
                raise unknown("format", name, FORMATS)

    def ops(self, model: nn.Module) -> Iterator[Op]:
        """A matrix each."""
        for number, block in enumerate(decoder_blocks(model)):
            for variant in self.forms:
                for name, linear in decoder_linears(block).items():
                    yield Op.of(number, name, variant, self._packed(variant, linear.weight.detach()))

    def expected_bytes(self, model: nn.Module) -> int:
        """The bytes of formats; sizes of codecs depend on the values."""
        total = 0
        for weight in linear_weights(model) if not isinstance(self.forms, Mapping) else ():
            sparsity = 1 - int(torch.count_nonzero(weight)) / max(weight.numel(), 1)
            for name in self.forms:
                with contextlib.suppress(UserError):
                    total += expected_nbytes(name, tuple(weight.shape), sparsity, weight.dtype)
        return total

    def _packed(self, variant: str, weight: Tensor) -> Packed:
        return self.forms[variant](weight) if isinstance(self.forms, Mapping) else encode(variant, weight)


@dataclass(frozen=True, eq=False)
class ChangedLinears(Layout):
    """The matrices of a quantised model, in one variant of that name.

    `pack` makes the stored form of a matrix, for a weight of the model's type; matrices may have different formats.
    """

    changed: ChangedModel
    variant: str
    pack: Callable[[Matrix, torch.dtype], Packed]

    @property
    def variants(self) -> Sequence[str]:
        """The variant's name."""
        return (self.variant,)

    def ops(self, model: nn.Module) -> Iterator[Op]:
        """A matrix each."""
        for number in range(len(self.changed.folders)):
            for op, matrix in self.changed.matrices(number).items():
                yield Op.of(number, op, self.variant, self.pack(matrix, model.dtype))

    def expected_bytes(self, model: nn.Module) -> int:
        """The bytes of the matrices."""
        return sum(of.nbytes for of in self.changed.statistics)


def pack_model(
    model: nn.Module,
    folder: Path,
    layout: Layout = Linears(),
    name: str = "unnamed",
    tokenizer: object | None = None,
    description: Mapping[str, object] | None = None,
    head: Pack | None = None,
    files: Callable[[Path], None] | None = None,
) -> None:
    """Write a model into a new folder, with everything that `Store` and `transformers` need to run it again.

    Args:
        model: decoder-only. It is made `plain`.
        folder: must not exist.
        layout: `Linears`, `ChangedLinears`, `Neurons` or `WholeExperts`.
        name: the model's name, for people.
        tokenizer: stored beside the configuration, in the folder `model/`.
        description: how the model was made (method, sparsity), as plain JSON.
        head: packs the rows of the output head, in parts that are stored as layers after the blocks; None leaves the
            head as it is, in memory. The model's head becomes a matrix of its own with the packed values.
        files: adds small files to the folder `model/`, such as predictors.

    Raises `UserError` as the layout's `check`, `check_head_alone`, `check_reopens`, `write_store` and `encode` do.
    """
    layout.check(plain(model))
    if head:
        check_head_alone(model.config)
    described = {"name": name, **layout.about(model), **(description or {})}
    ops, layers, weights = layout.ops(model), len(decoder_blocks(model)), layout.weights(model)
    if head:
        rows = rows_of_part(untied_head(model))
        ops = chain(ops, _head_ops(model, layout.variants, head, rows))
        weights = [*weights, model.get_output_embeddings().weight]
        described[HEAD_ROWS], layers = rows, layers + len(head_parts(model, rows))
    rest = tensors_beside(model, weights)
    check_reopens(model)

    def write_files(place: Path) -> None:
        for part in (layout.config(model), getattr(model, "generation_config", None), tokenizer):
            if part is not None:
                with hub.foreign_code(f"the {type(part).__name__} of {name}", "transformers cannot write it"):
                    part.save_pretrained(place)
        if files is not None:
            files(place)

    expected = layout.expected_bytes(model) + sum(tensor.nbytes for tensor in rest.values())

    def counted() -> Iterator[Op]:
        with progress("packing", layers, "layers") as bar:
            for op in ops:
                yield op
                bar.update(op.layer + 1 - bar.n)

    write_store(folder, counted(), rest.items(), described, write_files, expected)


def linear_weights(model: nn.Module) -> list[Tensor]:
    """The weights of all decoder linears."""
    return [linear.weight for layer in linears_by_layer(model, None) for linear in layer.values()]


def tensors_beside(model: nn.Module, weights: Iterable[Tensor]) -> dict[str, Tensor]:
    """All tensors of a model but these weights. A shared tensor is listed under its first name."""
    packed = {id(weight) for weight in weights}
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in packed:
            packed.add(id(tensor))
            found[name] = tensor
    return found


def _head_ops(model: nn.Module, variants: Sequence[str], head: Pack, rows: int) -> Iterator[Op]:
    """Each part of the head, packed once; the model's head gets the weights that it decodes to."""
    for number, part in enumerate(head_parts(model, rows), len(decoder_blocks(model))):
        packed = head(part.weight.detach())
        part.weight.data.copy_(decode(packed))
        for variant in variants:
            yield Op.of(number, HEAD, variant, packed)
