"""The contract of all formats; `docs/extending.md` lists what a new one touches."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.files import check_memory
from toolkit.kernels import dense
from toolkit.kernels.engine.parallel import Product
from toolkit.kernels.engine.tensors import check_operand

MAX_SIZE = (1 << 31) - 1  # of rows and of columns: column indices are int32
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16, torch.int8)}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.int8: torch.int8}
ROWS_AT_ONCE = 64  # rows of an int8 matrix that are widened together, so that they stay in the cache


class FormatError(UserError):
    """A file cannot be read, or does not hold what it should. The message names the file and the reason."""


class Packed(ABC):
    """A packed matrix: a frozen dataclass of `shape` and tensors.

    A format implements `encode`, `_fill` and `check`, and it is registered in `toolkit.formats.FORMATS`, or in
    `QUANTISED` if it decodes to what a quantiser chose. Then stores hold it and the runtime runs it: everything else
    has a default that works for every format.

    Tensors come from files that anyone may have written. The constructor refuses those whose types and shapes do not
    fit (`__post_init__`). It reads no contents: tensors on the device "meta" stand for some that are not read yet.
    `check` reads the contents, and stores call it when they verify. Readers may skip that, so `_fill` and `matvec`
    bound each offset themselves and touch no memory outside of the tensors. Bad contents give wrong numbers or an
    error there.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    is_dense: ClassVar[bool] = False  # the stored tensor is the dense matrix, so nothing is ever decoded
    has_matvec: ClassVar[bool] = False  # `matvec` reads the packed form and makes no dense matrix
    has_batched_matvec: ClassVar[bool] = False  # `matvec` takes several vectors, [batch, columns], too
    multiplied_packed: ClassVar[bool] = False  # so much quicker than decoding that races leave decoding out

    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    @abstractmethod
    def encode(cls, weight: Tensor) -> Self:
        """Pack a matrix that `as_matrix` has checked."""

    @abstractmethod
    def _fill(self, out: Tensor) -> None:
        """Write every element of the dense matrix to `out`, which has its shape and type and is contiguous."""

    @abstractmethod
    def check(self) -> None:
        """Raise `ValueError` with the reason unless the tensors agree with each other and with the shape."""

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """`nbytes` of such a matrix without packing one. Raises `UserError` where it depends on the values."""
        raise UserError(f"the size of format {cls.name!r} depends on the values: encode a matrix to know it")

    def unpack_into(self, out: Tensor) -> Tensor:
        """Unpack the matrix into `out` [rows, columns], which is on the device of the packed tensors, and return it.

        `endor`, `huffman`, `zstd` and `dense` use all cores and allocate nothing of the matrix's size. Raises
        `ValueError` for an `out` of another shape or type, or one that is not contiguous.
        """
        expect("out", out, self.dtype, tuple(self.shape))
        if not out.is_contiguous():
            raise ValueError("out is not contiguous")
        if out.numel():
            self._fill(row_major(out))
        return out

    def decode(self) -> Tensor:
        """The dense matrix, in new memory on the device of the packed one. Raises `UserError` if it has too little."""
        if self.device.type == "cpu":
            check_memory(self.dense_bytes, f"a dense matrix of {list(self.shape)}")
        return self.unpack_into(torch.empty(self.shape, dtype=self.dtype, device=self.device))

    def dense_in(self, scratch: Tensor) -> Tensor:
        """The dense matrix, for a product: in the first `scratch_bytes` of `scratch`, which are bytes.

        A format that is dense already returns its own tensor and leaves `scratch` alone.
        """
        return self.unpack_into(carve(scratch, self.shape, self.dtype)[0])

    def pieces(self, nbytes: int) -> Sequence["Packed"]:
        """The matrix as pieces of its rows that take at most so many bytes when dense; by default itself, whole.

        Their products, one behind the other, are the matrix's once `in_order` has put them into order.
        """
        return (self,)

    def in_order(self, y: Tensor) -> Tensor:
        """Products of the pieces [..., rows] as those of the matrix."""
        return y

    @classmethod
    def scratch_bytes(cls, shape: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes that `dense_in` needs for a matrix of this shape and type."""
        return 0 if cls.is_dense else shape[0] * shape[1] * dtype.itemsize

    def matvec(self, x: Tensor) -> Tensor:
        """The matrix times a real `x` of any strides, [*batch, columns] → fp32 [*batch, rows]: decoded by default."""
        return dense_matvec(self.decode(), x)

    def product(self, x: Tensor, out: Tensor) -> Product | None:
        """A product to be run again and again: fp32 `out` [rows] of the fp32 `x` [columns] at that moment.

        The tensors are on the CPU, contiguous and share no memory; sums are in fp32. A run looks up, checks and
        allocates nothing (`toolkit.kernels.engine.parallel`). None if the format has `matvec` alone.
        """
        return None

    @property
    def stored(self) -> "Packed":
        """The matrix as a registered format: itself, or the packed integers of int8 weights with scales."""
        return self

    @property
    def extras(self) -> dict[str, Tensor]:
        """The tensors that are stored beside the matrix: the scales of int8 weights, else none."""
        return {}

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense matrix."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(iter(self.tensors.values())).device

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, by name."""
        stored = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in stored.items() if isinstance(value, Tensor)}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all stored tensors: values, positions and offsets. A file's header is not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def of_parts(cls, shape: tuple[int, int], dtype: torch.dtype, tensors: dict[str, Tensor]) -> Self:
        """Make an instance of stored tensors, without a copy. Raises `ValueError` or `TypeError` if they do not fit.

        This is far cheaper than `check`. It does not look at the contents.
        """
        check_sizes(shape)
        header = {"shape": shape, "dtype": dtype}
        names = {field.name for field in dataclasses.fields(cls)}
        packed = cls(**tensors, **{name: value for name, value in header.items() if name in names})
        if packed.dtype != dtype:
            raise ValueError(f"values are {packed.dtype}, the header says {str(dtype).removeprefix('torch.')}")
        return packed


def as_matrix(weight: Tensor) -> Tensor:
    """The weight as a contiguous matrix on the CPU. Raises `UserError` for a tensor that no format can hold."""
    if not isinstance(weight, Tensor):
        raise UserError(f"cannot pack a {type(weight).__name__}; expected a torch.Tensor")
    if weight.ndim != 2:
        raise UserError(f"cannot pack a tensor of shape {list(weight.shape)}; expected 2 dimensions")
    if weight.dtype not in BITS or weight.layout != torch.strided or weight.is_meta:
        kind = "meta tensor" if weight.is_meta else f"{weight.layout} tensor of {weight.dtype}"
        raise UserError(f"cannot pack a {kind}; expected a strided one of {', '.join(DTYPES)}")
    if max(weight.shape) > MAX_SIZE:
        raise UserError(f"cannot pack a tensor of shape {list(weight.shape)}; expected at most {MAX_SIZE} a dimension")
    return row_major(weight.detach().cpu().contiguous())


def row_major(matrix: Tensor) -> Tensor:
    """A contiguous matrix with the strides of its shape. torch allows any stride in a dimension of one element."""
    return matrix.as_strided(matrix.shape, (matrix.shape[1], 1))


def check_sizes(shape: tuple[int, ...]) -> None:
    """Raise `ValueError` for a shape that no matrix or vector here has."""
    if not all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape):
        raise ValueError(f"shape {list(shape)}; expected integers from 0 to {MAX_SIZE}")


def bits(tensor: Tensor) -> Tensor:
    """The same memory as signed integers of the same width: comparing and copying integers is exact."""
    return tensor.view(BITS[tensor.dtype])


def non_zero(matrix: Tensor) -> Tensor:
    """Where elements are not zero. −0.0 counts as zero; subnormals do not, even if the processor flushes them."""
    if matrix.dtype == torch.int8:
        return matrix != 0
    return bits(matrix) & torch.iinfo(BITS[matrix.dtype]).max != 0


def all_finite(matrix: Tensor) -> bool:
    """Whether no element of a floating-point matrix is infinite or NaN."""
    infinity = int(bits(torch.tensor(torch.inf, dtype=matrix.dtype)))
    magnitudes = bits(matrix).numpy() & torch.iinfo(BITS[matrix.dtype]).max
    return bool(magnitudes.max(initial=0) < infinity)


def carve(scratch: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in the first bytes of `scratch`, and the bytes behind it."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return scratch[:nbytes].view(dtype).view(shape), scratch[nbytes:]


def dense_matvec(matrix: Tensor, x: Tensor) -> Tensor:
    """A dense matrix times a vector, as fp32.

    On the CPU the toolkit's kernel multiplies, since torch's product reads fp16 at a fraction of the memory's rate. On
    a GPU torch multiplies, in the matrix's own type. It has no product of int8 and fp32, so a few rows at a time are
    widened. Raises `ValueError` for a complex `x`.
    """
    check_operand(x)
    if matrix.device.type == "cpu" and matrix.dtype in BITS:
        return dense.matvec(matrix, x)
    if matrix.dtype != torch.int8:
        return (matrix @ x.to(matrix.dtype)).float()
    return torch.cat([rows.float() @ x.float() for rows in matrix.split(ROWS_AT_ONCE)])


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` if a stored tensor is not what the format says."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")


def expect_rising(name: str, offsets: Tensor, count: int, things: str) -> None:
    """Raise `ValueError` unless offsets run from 0 to `count` and never fall, so that each lies within the `things`.

    They are compared, not subtracted: a difference of two 64-bit numbers can wrap.
    """
    ends = bool(len(offsets)) and int(offsets[0]) == 0 and int(offsets[-1]) == count
    if not ends or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"{name} do not rise from 0 to {things}, {count}")
