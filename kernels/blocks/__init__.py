"""Blocks of GGUF files: matrices in the types of ggml, multiplied as they lie in the file.

A vector is rounded to 8 bits first, as llama.cpp does it: with a scale for every 32 columns, or for 256 with the
K-types and most of the IQ-types. Sums of a block are those of integers. So products have llama.cpp's numbers, up to the
order in which fp32 sums are added. Types of single numbers (`PLAIN`) are multiplied in fp32.

Ways to multiply:

    avx512  the toolkit's own kernels, for nineteen types: `unpacking.WIDE` and `NARROW`, `codebooks.CODEBOOKS`
    ggml    ggml's own functions, of the build that `toolkit.kernels.blocks.ggml` finds; all types
    gguf    decodes by the package `gguf` for each product: slow, and vectors are not rounded

`product` takes NumPy arrays; `toolkit.kernels.blocks.tensors` has the doors for tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from weakref import WeakValueDictionary

import numpy as np

from toolkit.kernels.blocks import cpu, cpu_avx512, cpu_panels, ggml
from toolkit.kernels.blocks.layout import LAYOUTS, PLAIN, ROUNDED, BlockLayout
from toolkit.kernels.engine.backends import AVX2, Backend, Backends
from toolkit.kernels.engine.elements import ITEM_BYTES
from toolkit.kernels.engine.parallel import Product, Task
from toolkit.kernels.engine.products import dense_task

__all__ = ["LAYOUTS", "PLAIN", "BlockLayout", "product"]

# gives the task that prepares vectors, by the name of the rounding, the vectors, and what makes the task
Prepared = Callable[[str, np.ndarray, Callable[[np.ndarray], Task]], Task]
PANELS = "avx512"  # the way that has panels
ROWS_AT_ONCE = 256  # decoded together by `gguf`, whose intermediate results take several times their size


def product(name: str, data: np.ndarray, x: np.ndarray, out: np.ndarray) -> Product:
    """The products of a matrix of blocks with `x`, to be run again and again with what `x` holds then.

    Args:
        name: the type of the blocks.
        data: uint8 [rows, bytes].
        x: fp32 [vectors, columns], contiguous. Products with the same `x` share what prepares it.
        out: fp32 [vectors, rows], contiguous, of other memory than `x`.
    """
    if name in PLAIN:
        return Product(dense_task(PLAIN[name], numbers(name, data), x, out))
    return backends(name).choose("auto").product(name, data, x, out, _shared)


def in_panels(name: str) -> bool:
    """Whether many vectors are multiplied with panels of unpacked rows: the more at once, the better.

    Their sums differ in the last bits from those of a few vectors.
    """
    return name not in PLAIN and backends(name).available()[0] == PANELS


def numbers(name: str, data: np.ndarray) -> np.ndarray:
    """The numbers of a type of `PLAIN`, as their bits, without a copy."""
    return data.view(f"u{ITEM_BYTES[PLAIN[name]]}")


@cache
def backends(name: str) -> Backends:
    """The ways to multiply blocks of a type, the fastest first."""
    return Backends({way: backend for way, backend in BACKENDS.items() if backend.knows(name)}, for_gpus=())


def _by_avx512(name: str, data: np.ndarray, x: np.ndarray, y: np.ndarray, prepared: Prepared) -> Product:
    way = cpu_panels if len(x) >= cpu_panels.FEWEST else cpu_avx512
    task = prepared(way.rounding(name), x, partial(way.preparing, name))
    return Product(Task(way.product(name), (data, *task.arguments[-3:], y), len(data), data.nbytes), (task,))


def _by_ggml(name: str, data: np.ndarray, x: np.ndarray, y: np.ndarray, prepared: Prepared) -> Product:
    of_ggml = ggml.functions(name)
    task = prepared(of_ggml.rounded, x, partial(_rounding, of_ggml))
    arguments = of_ggml.dot, data, x.shape[1], task.arguments[-1], y
    return Product(Task(cpu.product, arguments, len(data), data.nbytes), (task,))


def _rounding(of_ggml: ggml.Functions, x: np.ndarray) -> Task:
    rounded = np.empty((len(x), ROUNDED[of_ggml.rounded].row_bytes(x.shape[1])), np.uint8)
    return Task(cpu.quantise, (of_ggml.quantise, x, rounded))


# tasks that prepare vectors, by the rounding and the vectors' place: a task holds its vectors, so no others come there
_PREPARING: WeakValueDictionary[tuple, Task] = WeakValueDictionary()


def _shared(rounding: str, x: np.ndarray, make: Callable[[np.ndarray], Task]) -> Task:
    """The task that prepares these vectors, one for all products with them."""
    key = rounding, x.ctypes.data, x.shape
    task = _PREPARING.get(key)
    if task is None:
        _PREPARING[key] = task = make(x)
    return task


def prepared_anew(rounding: str, x: np.ndarray, make: Callable[[np.ndarray], Task]) -> Task:
    """A task of its own: several threads may multiply with the same vectors."""
    return make(x)


def _by_gguf(name: str, data: np.ndarray, x: np.ndarray, y: np.ndarray, prepared: Prepared) -> Product:
    def multiply() -> None:
        for first in range(0, len(data), ROWS_AT_ONCE):
            rows = decoded_by_gguf(name, data[first : first + ROWS_AT_ONCE])
            for vector, sums in zip(x, y, strict=True):  # BLAS adds up in another order for several at once
                with np.errstate(all="ignore"):
                    sums[first : first + ROWS_AT_ONCE] = rows @ vector

    return Product(Task(multiply, ()))


def decoded_by_gguf(name: str, data: np.ndarray) -> np.ndarray:
    """Rows of blocks as fp32 [rows, columns], by the package `gguf`."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # bytes may say anything
        return np.ascontiguousarray(dequantize(data, GGMLQuantizationType[name]), np.float32)


@dataclass(frozen=True)
class BlocksBackend(Backend):
    """A way to multiply. `product` takes a type's name, data, vectors [vectors, columns], results and a `Prepared`."""

    knows: Callable[[str], object]  # whether it multiplies a type, by its name


BACKENDS = Backends(
    {
        "avx512": BlocksBackend(AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}, _by_avx512, cpu_avx512.knows),
        "ggml": BlocksBackend(frozenset(), _by_ggml, ggml.functions),
        "gguf": BlocksBackend(frozenset(), _by_gguf, bool),
    },
    for_gpus=(),
)
