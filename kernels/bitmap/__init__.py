"""Bitmap-packed matrices: one bit per element and the non-zero values (ENDOR, section 4.1).

One door per operation: `encode`, `decompress`, `matvec`. `backend="auto"` takes the fastest that this CPU can run.

    [[1, 0, 0, 2],      bitmap       0b1001, 0b0000, 0b0010   (lowest bit = first column; rows padded to 32 bits)
     [0, 0, 0, 0],      row_offsets  0, 2, 2, 3
     [0, 3, 0, 0]]      values       1, 2, 3
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from toolkit.errors import UserError, unknown
from toolkit.kernels.bitmap import expand, portable, vector
from toolkit.kernels.bitmap.shared import WORD
from toolkit.kernels.simd import CACHE_LINE, host_has
from toolkit.kernels.threads import over_rows

BITS = {torch.float32: torch.uint32, torch.float16: torch.uint16, torch.bfloat16: torch.uint16, torch.int8: torch.uint8}
# the bits that make an element non-zero: for floats all but the sign, so that −0.0 counts as zero
SIGNIFICANT = {torch.float32: 0x7FFFFFFF, torch.float16: 0x7FFF, torch.bfloat16: 0x7FFF, torch.int8: 0xFF}
STREAM_BYTES = 8 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Bitmap:
    """A matrix as bitmap and non-zeros.

    ENDOR's bitmap is one vector of rows × columns bits; here each row starts a new 32-bit word and the number of values
    before it is kept, so that rows decode independently. Both are part of what is stored.
    """

    shape: tuple[int, int]
    bitmap: UInt8[Tensor, "rows row_bytes"]  # row_bytes = 4·⌈columns / 32⌉; bit k of byte j is column 8j + k
    row_offsets: Int64[Tensor, " rows+1"]
    values: Tensor  # [non_zeros], row-major

    def __post_init__(self):
        """Raise `ValueError` for tensors that do not fit the shape, before a kernel reads beyond them."""
        rows, columns = self.shape
        _expect("bitmap", self.bitmap, torch.uint8, (rows, row_bytes(columns)))
        _expect("row_offsets", self.row_offsets, torch.int64, (rows + 1,))
        _expect("values", self.values, self.values.dtype, (self.values.numel(),))
        if self.values.dtype not in BITS:
            raise ValueError(f"values are {self.values.dtype}; expected one of {_names(BITS)}")
        if int(self.row_offsets[0]) != 0 or int(self.row_offsets[-1]) != self.values.numel():
            raise ValueError(f"row offsets do not run from 0 to the number of values, {self.values.numel()}")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements: float32, float16, bfloat16 or int8."""
        return self.values.dtype

    def check(self) -> None:
        """Raise `ValueError` unless every row's bits and offsets agree; reads the whole bitmap."""
        words = _words(self.bitmap)
        counts = np.bitwise_count(words).sum(axis=1, dtype=np.int64)
        if not np.array_equal(counts, np.diff(self.row_offsets.numpy())):
            row = int(np.flatnonzero(counts != np.diff(self.row_offsets.numpy()))[0])
            raise ValueError(f"row {row} has {counts[row]} bits set in the bitmap, but its offsets say otherwise")
        beyond = self.shape[1] % WORD
        if beyond and np.any(words[:, -1] >> np.uint32(beyond)):
            raise ValueError(f"the bitmap has bits set beyond column {self.shape[1]}")


@dataclass(frozen=True)
class Backend:
    """One way to run the kernels, and the CPU features it needs, by LLVM's names."""

    features: frozenset[str]
    decompress: Callable  # streaming -> compiled function of rows
    matvec: Callable  # dtype -> compiled function of rows


def _vector(expand, *features: str) -> Backend:
    return Backend(frozenset(features), partial(vector.decompress, expand), partial(vector.matvec, expand))


# fastest first
BACKENDS = {
    "avx512": _vector(expand.by_instruction, "avx512f", "avx512bw", "avx512vl", "avx512vbmi2"),
    "avx2": _vector(expand.by_shuffle, "avx2", "fma", "f16c"),
    "portable": Backend(frozenset(), lambda streaming: portable.decompress, portable.matvec),
}


def encode(weight: Tensor) -> Bitmap:
    """Pack a matrix [rows, columns] of float32, float16, bfloat16 or int8.

    Exact to the bit, but for −0.0, which counts as zero and decodes as +0.0. NaN and infinities are non-zeros.
    """
    rows, columns = weight.shape
    dense = _bits(weight)
    bitmap = torch.empty(rows, row_bytes(columns), dtype=torch.uint8)
    words = _words(bitmap)
    row_offsets = torch.zeros(rows + 1, dtype=torch.int64)
    significant = dense.dtype.type(SIGNIFICANT[weight.dtype])
    over_rows(portable.mark, rows, dense.nbytes, dense, significant, words, row_offsets[1:].numpy())
    torch.cumsum(row_offsets, 0, out=row_offsets)
    values = torch.empty(int(row_offsets[-1]), dtype=weight.dtype)
    over_rows(portable.gather, rows, dense.nbytes, dense, words, row_offsets.numpy(), _bits(values))
    return Bitmap((rows, columns), bitmap, row_offsets, values)


def columns(encoded: Bitmap, dtype: torch.dtype) -> Tensor:
    """The column of every value, as `dtype` (an integer type that holds them), in row-major order."""
    words, row_offsets, values = _arrays(encoded)
    found = torch.empty(encoded.values.numel(), dtype=dtype)
    over_rows(portable.positions, encoded.shape[0], values.nbytes, words, row_offsets, found.numpy())
    return found


def decompress(encoded: Bitmap, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """The dense matrix [rows, columns], in `out` if given.

    Raises `UserError` for a backend that is unknown or that this CPU cannot run, and `ValueError` for an `out` of the
    wrong shape or type.
    """
    chosen = _choose(backend)
    if out is None:
        out = torch.empty(encoded.shape, dtype=encoded.dtype)
    _expect("out", out, encoded.dtype, encoded.shape)
    over_rows(chosen.decompress(_streaming(out)), encoded.shape[0], out.nbytes, *_arrays(encoded), _bits(out))
    return out


def matvec(
    encoded: Bitmap, x: Tensor, out: Float32[Tensor, " rows"] | None = None, backend: str = "auto"
) -> Float32[Tensor, " rows"]:
    """The product of the packed matrix with the vector `x` [columns], read straight from the packed form.

    `x` is taken as fp32 and the sums are kept in fp32, in an order that depends on the backend. Entries of `x` must be
    finite: a backend may multiply the zeros too.

    Raises `UserError` for a backend that is unknown or that this CPU cannot run, and `ValueError` for an `x` or `out`
    of the wrong shape or type.
    """
    chosen = _choose(backend)
    rows, columns = encoded.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.float32)
    _expect("out", out, torch.float32, (rows,))
    _expect("x", x, x.dtype, (columns,))
    x = x.to(torch.float32)
    over_rows(chosen.matvec(encoded.dtype), rows, encoded.values.nbytes, *_arrays(encoded), x.numpy(), out.numpy())
    return out


def available() -> list[str]:
    """The backends that this CPU can run, fastest first."""
    return [name for name, backend in BACKENDS.items() if all(map(host_has, backend.features))]


def row_bytes(columns: int) -> int:
    """Bytes of one row of a bitmap: whole 32-bit words."""
    return -(-columns // WORD) * (WORD // 8)


def _choose(name: str) -> Backend:
    if name == "auto":
        return BACKENDS[_fastest()]
    if name not in BACKENDS:
        raise unknown("backend", name, ["auto", *BACKENDS])
    if name not in available():
        missing = ", ".join(sorted(feature for feature in BACKENDS[name].features if not host_has(feature)))
        raise UserError(f"backend {name!r} needs a CPU with {missing}; this one can run: {', '.join(available())}")
    return BACKENDS[name]


@cache
def _fastest() -> str:
    name = available()[0]
    log.info("bitmap kernels: %s backend", name)
    return name


def _streaming(out: Tensor) -> bool:
    """Whether to write past the caches: only whole cache lines, and only what would not stay in the caches anyway."""
    row_nbytes = out.shape[1] * out.itemsize
    return out.nbytes >= STREAM_BYTES and row_nbytes % CACHE_LINE == 0 and out.data_ptr() % CACHE_LINE == 0


def _arrays(encoded: Bitmap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _words(encoded.bitmap), encoded.row_offsets.numpy(), _bits(encoded.values)


def _words(bitmap: Tensor) -> np.ndarray:
    return bitmap.numpy().view(np.uint32)


def _bits(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as unsigned integers of the elements' width."""
    return tensor.view(BITS[tensor.dtype]).numpy()


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on the CPU")


def _names(dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
