"""Blocks of GGUF files: matrices in the types of ggml, multiplied as they lie in the file.

A vector is rounded to 8 bits first, as llama.cpp does it: with a scale for every 32 columns, or for 256 with the
K-types and most of the IQ-types. Sums of a block are those of integers. So products have llama.cpp's numbers, up to the
order in which fp32 sums are added. Types of single numbers (`PLAIN`) are multiplied in fp32.

Ways to multiply:

    avx512  the toolkit's own kernels, for fourteen types: `cpu_avx512.WIDE` and `NARROW`
    ggml    ggml's own functions, of the build that `toolkit.kernels.blocks.ggml` finds; all types
    gguf    decodes by the package `gguf` for each product: slow, and vectors are not rounded
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from weakref import WeakValueDictionary

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from toolkit.kernels import dense
from toolkit.kernels.blocks import cpu, cpu_avx512, ggml
from toolkit.kernels.blocks.layout import LAYOUTS, PLAIN, ROUNDED, BlockLayout
from toolkit.kernels.engine.backends import AVX2, CPU, Backend, Backends, expect, operands
from toolkit.kernels.engine.elements import FLOAT_BITS
from toolkit.kernels.engine.parallel import Product, Task, over_rows

__all__ = ["LAYOUTS", "PLAIN", "BlockLayout", "decode", "matvec", "product"]

# gives the task that prepares vectors, by the name of the rounding, the vectors, and what makes the task
Prepared = Callable[[str, np.ndarray, Callable[[np.ndarray], Task]], Task]
ROWS_AT_ONCE = 256  # decoded together by `gguf`, whose intermediate results take several times their size


def decode(name: str, data: UInt8[Tensor, "rows bytes"], out: Float[Tensor, "rows columns"]) -> None:
    """Decode blocks of type `name` into `out`, contiguous: in fp32, and rounded once to its type.

    Raises `ValueError` for tensors of the wrong shape, type or device.
    """
    rows, columns = out.shape
    expect("data", data, torch.uint8, (rows, LAYOUTS[name].row_bytes(columns)), CPU)
    expect("out", out, out.dtype, (rows, columns), CPU)
    if name in PLAIN:
        out.copy_(numbers(name, data))
    elif (of_ggml := ggml.functions(name)) and out.dtype in FLOAT_BITS:
        bits = out.detach().view(FLOAT_BITS[out.dtype]).numpy()
        over_rows(cpu.decoded(out.dtype), rows, out.nbytes, of_ggml.decode, data.numpy(), bits)
    else:
        _decode_by_gguf(name, data, out)


def numbers(name: str, data: UInt8[Tensor, "rows bytes"]) -> Float[Tensor, "rows columns"]:
    """The matrix of a type of `PLAIN`, without a copy."""
    return data.view(PLAIN[name])


def matvec(
    name: str,
    data: UInt8[Tensor, "rows bytes"],
    x: Float[Tensor, "*batch columns"],
    out: Float32[Tensor, "*batch rows"] | None = None,
    backend: str = "auto",
) -> Float32[Tensor, "*batch rows"]:
    """The product of a matrix of blocks with `x`, [columns] or [batch, columns], taken as fp32.

    A row is read from memory once for all vectors. Bytes of any contents are taken: scales that are not finite give
    products that are not.

    Raises `UserError` for a backend that is unknown, that this machine cannot run or that does not know the type, and
    `ValueError` for tensors of the wrong shape, type or device.
    """
    if name in PLAIN:
        return dense.matvec(numbers(name, data), x, out)
    columns = x.shape[-1]
    expect("data", data, torch.uint8, (len(data), LAYOUTS[name].row_bytes(columns)), CPU)
    kernels = backends(name).choose(backend)
    with operands(x, out, (len(data), columns), CPU) as (each_x, each_out, result):
        given = data.detach().numpy(), each_x.to(torch.float32).numpy(), each_out.numpy()
        made = kernels.product(name, *given, _anew)
        for task in (*made.before, made.task):
            task()
    return result


def product(
    name: str, data: UInt8[Tensor, "rows bytes"], x: Float32[Tensor, " columns"], out: Float32[Tensor, " rows"]
) -> Product:
    """The product of `matvec`, to be run again and again with what `x` holds then.

    `x` and `out` are contiguous and share no memory. Products with one vector share what prepares it.
    """
    if name in PLAIN:
        return dense.product(numbers(name, data), x, out)
    kernels = backends(name).choose("auto")
    return kernels.product(name, data.detach().numpy(), x[None].numpy(), out[None].numpy(), _shared)


@cache
def backends(name: str) -> Backends:
    """The ways to multiply blocks of a type, the fastest first."""
    return Backends({way: backend for way, backend in BACKENDS.items() if backend.knows(name)}, for_gpus=())


def _by_avx512(name: str, data: np.ndarray, x: np.ndarray, y: np.ndarray, prepared: Prepared) -> Product:
    task = prepared(cpu_avx512.rounding(name), x, partial(cpu_avx512.preparing, name))
    return Product(Task(cpu_avx512.product(name), (data, *task.arguments[-3:], y), len(data), data.nbytes), (task,))


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


def _anew(rounding: str, x: np.ndarray, make: Callable[[np.ndarray], Task]) -> Task:
    """A task of its own: several threads may multiply with the same vectors."""
    return make(x)


def _by_gguf(name: str, data: np.ndarray, x: np.ndarray, y: np.ndarray, prepared: Prepared) -> Product:
    def multiply() -> None:
        for first in range(0, len(data), ROWS_AT_ONCE):
            decoded = torch.from_numpy(_decoded_by_gguf(name, data[first : first + ROWS_AT_ONCE]))
            y[:, first : first + ROWS_AT_ONCE] = dense.matvec(decoded, torch.from_numpy(x)).numpy()

    return Product(Task(multiply, ()))


def _decode_by_gguf(name: str, data: Tensor, out: Tensor) -> None:
    for rows, some in zip(out.split(ROWS_AT_ONCE), data.split(ROWS_AT_ONCE), strict=True):
        rows.copy_(torch.from_numpy(_decoded_by_gguf(name, some.numpy())))


def _decoded_by_gguf(name: str, data: np.ndarray) -> np.ndarray:
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
