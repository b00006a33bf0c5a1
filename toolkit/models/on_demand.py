"""A model that may be larger than memory: a decoder block has its tensors only while it is used.

    model, tokenizer = open_model("qwen2.5-coder-1.5b")      # of `toolkit.models.loading`
    with present(decoder_blocks(model)[3]) as block: ...     # its tensors, read from the model's files
    model(tokens)                                            # one block after the other has them

A tensor that is absent has its shape and type, and not-a-number everywhere in the memory of one number. Rows of the
input embedding and of the head are read when they are used, too. All other tensors, such as the last norm, stay.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from math import prod
from types import MethodType
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.models.blocks import decoder_blocks
from toolkit.models.plain import plain

HEAD_BYTES = 64 << 20  # of the head's rows are multiplied at a time
PART_BYTES = 64 << 20  # of an embedding's or a head's rows are written at a time
PART, ROWS = "_on_demand", "_rows_on_demand"  # attributes of a block, and of an embedding or a head


class TensorSource(ABC):
    """Where the tensors of a model lie.

    `outline` is the model as transformers makes it, on the device "meta"; names and types are those of its tensors.
    """

    outline: nn.Module

    @abstractmethod
    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """These tensors, which belong to one block or to none. They may be views of a file."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Float[Tensor, "rows columns"]:
        """Some rows of a matrix that is in no block."""


def shares_tensors(model: nn.Module) -> bool:
    """Whether a tensor of a decoder block has another place in the model, too: such a model cannot come in blocks."""
    blocks = decoder_blocks(model)
    tensors = [tensor for block in blocks for tensor in block.state_dict(keep_vars=True).values()]
    inside = {id(tensor) for tensor in tensors}
    every = [tensor for tensor in model.state_dict(keep_vars=True).values() if id(tensor) in inside]
    return len(inside) < len(tensors) or len(every) > len(tensors)


@torch.no_grad()
def on_demand(model: nn.Module, source: TensorSource) -> nn.Module:
    """Have a model read its tensors from a source when they are used, in place; return the model.

    `model` is `plain`, has its computed buffers and no other tensor. No tensor of a block has another place.
    """
    outlines = decoder_blocks(source.outline)
    prefixes = block_prefixes(source.outline)
    for block, outline, prefix in zip(decoder_blocks(model), outlines, prefixes, strict=True):
        _Part(block, lambda outline=outline, prefix=prefix: _loaded(source, outline, prefix))
    places: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        places.setdefault(id(tensor), []).append(name)
    inside = tuple(f"{prefix}." for prefix in prefixes)
    whole = [names for names in places.values() if not names[0].startswith(inside)]
    for names in whole.copy():
        if forwards := _by_rows(model, tensors[names[0]], len(names), names[0], source):
            gone = nn.Parameter(_absent(tensors[names[0]]), requires_grad=False)
            put(model, dict.fromkeys(names, gone))
            for end, forward in forwards.items():
                end.forward = forward(end)
                setattr(end, ROWS, partial(source.rows, names[0]))
            whole.remove(names)
    read = source.tensors([names[0] for names in whole])
    for names in whole:
        put(model, dict.fromkeys(names, read[names[0]]))
    return model


@contextmanager
def present(module: nn.Module) -> Iterator[nn.Module]:
    """Inside the block, a decoder block has its tensors. One that has them always stays as it is.

    Changes of the tensors are lost at the end.
    """
    part = vars(module).get(PART)
    if part is None:
        yield module
        return
    with part:
        yield module


def is_on_demand(model: nn.Module) -> bool:
    """Whether a model's blocks have their tensors only while they are used."""
    return any(vars(block).get(PART) for block in decoder_blocks(model))


def first_outputs(model: nn.Module, tokens: Int64[Tensor, "texts tokens"]) -> Float[Tensor, "texts tokens hidden"]:
    """The outputs of the first decoder block. Nothing behind it runs."""

    def stop(_: nn.Module, __: tuple, output: Tensor | tuple | list) -> None:
        raise _FirstError(output[0] if isinstance(output, tuple | list) else output)

    handle = decoder_blocks(model)[0].register_forward_hook(stop)
    try:
        model.base_model(tokens, use_cache=False)
    except _FirstError as first:
        return first.args[0]
    finally:
        handle.remove()
    raise AssertionError("the model has run without its first block")


@contextmanager
def holding(block: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """Inside the block, a decoder block has these tensors, by their names in it, instead of its own."""
    part = vars(block).get(PART)
    if part is None:
        put(block, tensors)
        yield block
        return
    with part.holding(tensors):
        yield block


def own_forward(module: nn.Module) -> Callable | None:
    """A `forward` that a module alone has, and not its class; None without one, and for a block on demand."""
    own = vars(module).get("forward")
    return None if isinstance(own, _Forward) else own


def rows_of(module: nn.Module, start: int, stop: int) -> Float[Tensor, "rows columns"]:
    """Some rows of the matrix of an input embedding or a head."""
    read = vars(module).get(ROWS)
    return module.weight.detach()[start:stop] if read is None else read(start, stop)


@dataclass(frozen=True, eq=False)
class Rows:
    """The matrix of an input embedding or a head, of which some rows are in memory at a time: its parts, in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return prod(self.shape) * self.dtype.itemsize

    def __iter__(self) -> Iterator[Tensor]:
        """The parts."""
        step = max(PART_BYTES * self.shape[0] // self.nbytes, 1)
        return (self.read(start, min(start + step, self.shape[0])) for start in range(0, self.shape[0], step))


def tensor_of(model: nn.Module, name: str) -> Tensor | Rows:
    """A tensor of a model that is in no decoder block."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    tensor = getattr(module, own)
    by_rows = own == "weight" and ROWS in vars(module)
    return Rows(tuple(tensor.shape), tensor.dtype, partial(rows_of, module)) if by_rows else tensor


class _FirstError(Exception):
    """Ends a pass behind the first block and carries its output."""


class _Part:
    """The tensors of a decoder block, which are in memory as long as somebody uses them."""

    def __init__(self, block: nn.Module, load: Callable[[], Mapping[str, Tensor]]):
        self._block, self._load, self._users = block, load, 0
        self._gone = {name: _absent(tensor) for name, tensor in block.state_dict(keep_vars=True).items()}
        put(block, self._gone)
        setattr(block, PART, self)
        block.forward = _Forward(block, self)

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of a block has the tensors that the block has."""

    def __enter__(self) -> None:
        if not self._users:
            put(self._block, self._load())
        self._users += 1

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        load, self._load = self._load, lambda: tensors
        try:
            with self:
                yield
        finally:
            self._load = load

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users:
            put(self._block, self._gone)


class _Forward:
    """The `forward` of a block on demand, which has its tensors meanwhile."""

    def __init__(self, block: nn.Module, part: _Part):
        self._inner, self._part = cast(MethodType, block.forward), part
        update_wrapper(self, self._inner)

    def __call__(self, *args, **kwargs):
        with self._part:
            return self._inner(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callable:
        return MethodType(self._inner.__func__, memo[id(self._inner.__self__)])


def put(root: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set tensors of a module by their names. Tensors that are one object stay one."""
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        module = root.get_submodule(path)
        if own in module._buffers:
            module._buffers[own] = tensor.detach()
        else:
            parameter = isinstance(tensor, nn.Parameter)
            module._parameters[own] = tensor if parameter else nn.Parameter(tensor, requires_grad=False)


def _absent(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and type in the memory of one number."""
    value = torch.nan if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def block_prefixes(model: nn.Module) -> list[str]:
    """The name of each decoder block in a model."""
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in decoder_blocks(model)]


@torch.no_grad()
def _loaded(source: TensorSource, outline: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The tensors of a block by their names in a plain one."""
    block = copy.deepcopy(outline)
    names = list(block.state_dict())
    read = source.tensors([f"{prefix}.{name}" for name in names])
    block.load_state_dict({name: read[f"{prefix}.{name}"] for name in names}, assign=True)
    return {name: tensor.detach() for name, tensor in plain(block).state_dict(keep_vars=True).items()}


def _by_rows(model: nn.Module, weight: Tensor, uses: int, name: str, source: TensorSource) -> dict[nn.Module, Callable]:
    """The embedding and the head with this weight, and what gives each a `forward` that reads rows.

    None of them if something else uses the weight as well.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: dict[nn.Module, Callable] = {}
    if isinstance(embedding, nn.Embedding) and embedding.weight is weight:
        found[embedding] = partial(_look_up, name=name, source=source)
    if type(head) is nn.Linear and head.weight is weight:
        found[head] = partial(_multiply, name=name, source=source)
    return found if len(found) == uses else {}


def _look_up(embedding: nn.Embedding, name: str, source: TensorSource) -> Callable[[Tensor], Tensor]:
    """The `forward` of an input embedding of any class, which reads the rows of its ids."""
    inner, gone = embedding.forward, embedding.weight
    embedding.padding_idx = None  # it matters to gradients alone, and would have to be a row of those read

    def forward(ids: Int64[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        wanted, places = ids.unique(return_inverse=True)
        rows = [source.rows(name, first, last + 1) for first, last in _runs(wanted.tolist())]
        embedding.weight = nn.Parameter(torch.cat(rows), requires_grad=False)
        try:
            return inner(places)
        finally:
            embedding.weight = gone

    return forward


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of numbers in a row; the numbers rise."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _multiply(head: nn.Linear, name: str, source: TensorSource) -> Callable[[Tensor], Tensor]:
    """The `forward` of an output head, which reads its rows in parts."""
    rows, columns = head.weight.shape
    step = max(HEAD_BYTES // (columns * head.weight.itemsize), 1)

    def forward(x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocabulary"]:
        parts = []
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            bias = None if head.bias is None else head.bias[start:stop]
            parts.append(functional.linear(x, source.rows(name, start, stop), bias))
        return torch.cat(parts, dim=-1)

    return forward
