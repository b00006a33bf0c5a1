"""The doors of blocks for tensors: decode a matrix, or multiply it, with checks of what is given."""

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from toolkit.kernels import blocks, dense
from toolkit.kernels.blocks import cpu, decoded_by_gguf, ggml
from toolkit.kernels.blocks.layout import LAYOUTS, PLAIN
from toolkit.kernels.engine.parallel import Product, over_rows
from toolkit.kernels.engine.tensors import CPU, FLOAT_BITS, expect, operands


def decode(name: str, data: UInt8[Tensor, "rows bytes"], out: Float[Tensor, "rows columns"]) -> None:
    """Decode blocks of type `name` into `out`, contiguous: in fp32, and rounded once to its type.

    Raises `ValueError` for tensors of the wrong shape, type or device.
    """
    rows, columns = out.shape
    expect("data", data, torch.uint8, (rows, LAYOUTS[name].row_bytes(columns)), CPU)
    expect("out", out, out.dtype, (rows, columns), CPU)
    if name in PLAIN:
        out.copy_(_numbers(name, data))
    elif (of_ggml := ggml.functions(name)) and out.dtype in FLOAT_BITS:
        bits = out.detach().view(FLOAT_BITS[out.dtype]).numpy()
        over_rows(cpu.decoded(out.dtype), rows, out.nbytes, of_ggml.decode, data.numpy(), bits)
    else:
        _decode_by_gguf(name, data, out)


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
        return dense.matvec(_numbers(name, data), x, out)
    columns = x.shape[-1]
    expect("data", data, torch.uint8, (len(data), LAYOUTS[name].row_bytes(columns)), CPU)
    kernels = blocks.backends(name).choose(backend)
    with operands(x, out, (len(data), columns), CPU) as (each_x, each_out, result):
        given = data.detach().numpy(), each_x.to(torch.float32).numpy(), each_out.numpy()
        made = kernels.product(name, *given, blocks.prepared_anew)
        for task in (*made.before, made.task):
            task()
    return result


def product(
    name: str, data: UInt8[Tensor, "rows bytes"], x: Float32[Tensor, " columns"], out: Float32[Tensor, " rows"]
) -> Product:
    """The product of `matvec`, to be run again and again with what `x` holds then.

    `x` and `out` are contiguous and share no memory. Products with one vector share what prepares it.
    """
    return blocks.product(name, data.detach().numpy(), x[None].numpy(), out[None].numpy())


def _numbers(name: str, data: UInt8[Tensor, "rows bytes"]) -> Float[Tensor, "rows columns"]:
    """The matrix of a type of `PLAIN`, without a copy."""
    return data.view(getattr(torch, PLAIN[name]))


def _decode_by_gguf(name: str, data: Tensor, out: Tensor) -> None:
    step = blocks.ROWS_AT_ONCE
    for rows, some in zip(out.split(step), data.split(step), strict=True):
        rows.copy_(torch.from_numpy(decoded_by_gguf(name, some.numpy())))
