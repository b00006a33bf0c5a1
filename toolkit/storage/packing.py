"""Packing a model as a store: some weights as ops of a layout, and all other tensors as they are.

pack_model(model, folder, Linears(("endor", "dense")), "smollm2-135m", tokenizer)
pack_model(model, folder, Neurons(thresholds), "smollm2-135m", tokenizer)       # of toolkit.storage.neuron_packing
pack_model(model, folder, WholeExperts(bits=4), "mixtral", tokenizer)           # of toolkit.storage.experts
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit import hub
from toolkit.errors import UserError, unknown
from toolkit.formats import FORMATS, Packed, decode, encode, expected_nbytes
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.head import HEAD, linears_by_layer
from toolkit.models.on_demand import Rows, block_prefixes, holding, present, tensor_of
from toolkit.models.plain import plain
from toolkit.models.skeleton import check_reopens
from toolkit.models.streams import Stream, inference
from toolkit.progress import progress
from toolkit.sparsity.changed import ChangedModel
from toolkit.sparsity.layerwise import Matrix
from toolkit.sparsity.treatment import Treatment, joined, part_of
from toolkit.storage.head_packing import HeadParts, Pack
from toolkit.storage.runs import OpRun
from toolkit.storage.unfinished import Unfinished
from toolkit.storage.writing import Op, write_layers

REST, FINDING = "rest", "finding"  # of the tensors that are kept with a written block: the model's, the treatment's
ROUNDED = 0.7  # of a weight's norm: 2 bits of a weight are off by 0.45; another matrix is by 1.4, zeros are by 1


class Layout(ABC):
    """How weights of decoder blocks are stored in a folder, in one or more variants. The default: linears."""

    @property
    @abstractmethod
    def variants(self) -> Sequence[str]:
        """The names of the variants."""

    @abstractmethod
    def ops(
        self, model: nn.Module, number: int, block: nn.Module, variant: str, matrices: Mapping[str, Matrix]
    ) -> Iterator[Op]:
        """The ops of a decoder block, which is in memory, in one variant.

        `matrices` are those that the model's treatment has made of its linears.
        """

    def pairs(self, block: nn.Module, run: OpRun, packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight of a decoder block that a stored op holds, and the values that the op decodes to."""
        yield block.get_submodule(run.op).weight, decode(packed)

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
    sparsity: float | None = None
    """The share of zeros that weights will have; None counts those that they have."""

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

    def ops(
        self, model: nn.Module, number: int, block: nn.Module, variant: str, matrices: Mapping[str, Matrix]
    ) -> Iterator[Op]:
        """A matrix each."""
        for name, linear in decoder_linears(block).items():
            yield Op.of(number, name, variant, self._packed(variant, linear.weight.detach()))

    def expected_bytes(self, model: nn.Module) -> int:
        """The bytes of formats; sizes of codecs depend on the values. Weights in int8 have half of them."""
        total, width = 0, 1
        if isinstance(self.forms, Mapping):
            width = model.dtype.itemsize
        for weight in linear_weights(model):
            sparsity = self.sparsity
            if sparsity is None:
                sparsity = 1 - int((weight != 0).sum()) / max(weight.numel(), 1)
            for name in self.forms:
                with contextlib.suppress(UserError):
                    total += expected_nbytes(name, tuple(weight.shape), sparsity, weight.dtype) // width
        return total

    def _packed(self, variant: str, weight: Tensor) -> Packed:
        return self.forms[variant](weight) if isinstance(self.forms, Mapping) else encode(variant, weight)


@dataclass(frozen=True, eq=False)
class ChangedLinears(Layout):
    """The matrices that a treatment makes of the linears, in one variant of that name.

    `pack` makes the stored form of a matrix, for a weight of the model's type; matrices may have different formats.
    `bits` of a weight are expected.
    """

    variant: str
    pack: Callable[[Matrix, torch.dtype], Packed]
    bits: float = 5.0

    @property
    def variants(self) -> Sequence[str]:
        """The variant's name."""
        return (self.variant,)

    def ops(
        self, model: nn.Module, number: int, block: nn.Module, variant: str, matrices: Mapping[str, Matrix]
    ) -> Iterator[Op]:
        """A matrix each."""
        for op in decoder_linears(block):
            yield Op.of(number, op, variant, self.pack(matrices[op], model.dtype))

    def expected_bytes(self, model: nn.Module) -> int:
        """The bytes of the matrices."""
        return int(sum(weight.numel() for weight in linear_weights(model)) * self.bits / 8)


class Made(Treatment):
    """The blocks of a model that was changed and kept already (`load_changed`)."""

    def __init__(self, changed: ChangedModel):
        self._changed = changed

    def treat(self, number: int, block: nn.Module) -> Mapping[str, Matrix]:
        """The kept matrices."""
        return self._changed.matrices(number)


def pack_model(
    model: nn.Module,
    folder: Path,
    layout: Layout = Linears(),
    name: str = "unnamed",
    tokenizer: object | None = None,
    description: Mapping[str, object] | None = None,
    head: Pack | None = None,
    files: Callable[[Path], None] | None = None,
    treatment: Treatment | None = None,
    written: nn.Module | None = None,
    followers: Sequence[Stream] = (),
    unfinished: Unfinished | None = None,
    check: bool = False,
) -> None:
    """Write a model into a new folder, with everything that `Store` and `transformers` need to run it again.

    Decoder blocks are treated and written one after the other.

    Args:
        model: decoder-only. It is made `plain`.
        folder: must not exist.
        layout: `Linears`, `ChangedLinears`, `Neurons` or `WholeExperts`.
        name: the model's name, for people.
        tokenizer: stored beside the configuration, in the folder `model/`.
        description: how the model was made (method, sparsity), as plain JSON.
        head: packs the rows of the output head, in parts that are stored as layers after the blocks; None leaves the
            head as it is, in memory. The head of a model in memory becomes a matrix of its own with the packed values.
        files: adds small files to the folder `model/`, such as predictors.
        treatment: changes each block before it is written.
        written: the same model in the type that is written, if that is another one.
        followers: texts that run through the blocks as they are written.
        unfinished: holds the written blocks until all are written. A model on demand needs it.
        check: read each block back, and compare what it decodes to with the treated block.

    Raises `UserError` if they differ, and as the layout's `check`, `check_head_alone`, `check_reopens`, `write_layers`,
    the treatment and `encode` do.
    """
    walk = _Walk(plain(model), written or model, layout, treatment or Treatment(), followers, unfinished)
    target = walk.target
    layout.check(plain(target))
    parts, blocks = HeadParts(target, head), len(decoder_blocks(target))
    rest = tensors_beside(target, [*layout.weights(target), *parts.weights])
    check_reopens(target)

    def about() -> dict[str, object]:
        return {"name": name, **layout.about(target), **(description or {}), **parts.about}

    def write_files(place: Path) -> None:
        for part in (layout.config(target), getattr(target, "generation_config", None), tokenizer):
            if part is not None:
                with hub.foreign_code(f"the {type(part).__name__} of {name}", "transformers cannot write it"):
                    part.save_pretrained(place)
        if files is not None:
            files(place)

    def compare(run: OpRun, packed: Packed) -> None:
        in_block = run.layer < blocks
        for pair in layout.pairs(walk.block, run, packed) if in_block else [parts.pair(run, packed)]:
            _compare(run, *pair)

    layers = _counted(chain(walk.layers(rest), parts.layers(layout.variants)), blocks + parts.count)
    expected = layout.expected_bytes(target) + sum(tensor.nbytes for tensor in rest.values())
    compared = compare if check else None
    write_layers(folder, layers, walk.rest(rest), about, write_files, expected, unfinished, compared)


def _counted(groups: Iterable[list[Op]], layers: int) -> Iterator[list[Op]]:
    """The same, with a bar of so many layers."""
    with progress("packing", layers, "layers") as bar:
        for group in groups:
            number = group[0].layer
            yield group
            bar.update(number + 1 - bar.n)


def _compare(run: OpRun, weight: Tensor, values: Tensor) -> None:
    """Raise `UserError` if what a file holds decodes to other values than the weight, or is off by more than rounding.

    Few bits round a weight when it is written. Otherwise the values are equal, but that no format keeps the sign of 0.
    """
    if run.op == HEAD or run.scales_dtype or not run.dtype.is_floating_point:
        error = torch.linalg.vector_norm(values.float().sub_(weight))
        same = bool(error <= ROUNDED * torch.linalg.vector_norm(weight, dtype=torch.float32))
    else:
        same = torch.equal(weight, values) or bool(((weight == values) | (weight.isnan() & values.isnan())).all())
    if not same:
        raise UserError(
            f"{run.label}: the file decodes to other weights than those that were to be written: the disk is faulty, "
            "or the toolkit is; pack again, and report it if it stays so"
        )


class _Walk:
    """The blocks of a model on their way to the disk."""

    def __init__(
        self,
        model: nn.Module,
        target: nn.Module,
        layout: Layout,
        treatment: Treatment,
        followers: Sequence[Stream],
        unfinished: Unfinished | None,
    ):
        self.model, self.target, self._layout, self._treatment = model, target, layout, treatment
        self._followers, self._unfinished = followers, unfinished
        self.block: nn.Module | None = None  # as it is written
        self._moving: dict[str, Treatment | Stream] = {"treatment": treatment}
        self._moving |= {f"follower {number}": follower for number, follower in enumerate(followers)}
        self._prefixes = [f"{prefix}." for prefix in block_prefixes(target)]

    @torch.no_grad()
    def layers(self, rest: Collection[str]) -> Iterator[list[Op]]:
        """The ops of each block and variant. Blocks that are written already are left out."""
        first = 0 if self._unfinished is None else self._unfinished.number
        with inference(self.model), inference(self.target), closing(self._treatment):
            self._treatment.begin(self.model)
            if first:
                self._restore(first)
            for number, block in enumerate(decoder_blocks(self.model)):
                if number >= first:
                    yield from self._layers_of(number, block, rest)

    def rest(self, names: Collection[str]) -> Iterator[tuple[str, Tensor | Rows]]:
        """The tensors beside the ops' weights, by their names."""
        opened: dict[int, dict[str, Tensor]] = {}
        tensors = self.target.state_dict(keep_vars=True)
        for name in names:
            number = next((n for n, prefix in enumerate(self._prefixes) if name.startswith(prefix)), None)
            if number is None or self._unfinished is None:
                yield name, tensors[name] if number is not None else tensor_of(self.target, name)
                continue
            if number not in opened:
                opened = {number: part_of(self._unfinished.beside(number), REST)}
            yield name, opened[number][name]

    def _layers_of(self, number: int, block: nn.Module, rest: Collection[str]) -> Iterator[list[Op]]:
        with present(block), ExitStack() as stack:
            matrices = self._treatment.treat(number, block)
            target = decoder_blocks(self.target)[number]
            if target is not block:
                stack.enter_context(holding(target, _cast(block, target)))
            self.block = target
            for follower in self._followers:
                follower.advance()
            for variant in self._layout.variants:
                if ops := list(self._layout.ops(self.target, number, target, variant, matrices)):
                    yield ops
            if self._unfinished is not None:
                prefix = self._prefixes[number]
                tensors = target.state_dict()
                own = {name: tensors[name.removeprefix(prefix)] for name in rest if name.startswith(prefix)}
                beside = joined({REST: own, FINDING: self._treatment.finding})
                self._unfinished.finish(number, beside, joined({name: it.state for name, it in self._moving.items()}))
                self._recall(number)

    def _restore(self, first: int) -> None:
        """Go on before block `first`."""
        state = self._unfinished.state()
        for name, one in self._moving.items():
            one.restore(part_of(state, name), first)
        for number in range(first):
            self._recall(number)

    def _recall(self, number: int) -> None:
        self._treatment.recall(number, part_of(self._unfinished.beside(number), FINDING))


def _cast(block: nn.Module, target: nn.Module) -> dict[str, Tensor]:
    """The tensors of a block in the types of another one."""
    types = {name: tensor.dtype for name, tensor in target.state_dict().items()}
    return {name: tensor.to(types[name]) for name, tensor in block.state_dict().items()}


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
