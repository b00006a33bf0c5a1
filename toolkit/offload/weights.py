"""What is done with a weight once it is where products are taken: unpack it, multiply it with one token's vector."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from toolkit.formats import Packed
from toolkit.formats.codecs import Codec
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.formats.scaled import Scaled
from toolkit.kernels import bitmap
from toolkit.quantization import dequantise
from toolkit.storage.runs import OpRun

ROWS_AT_ONCE = 64  # of an int8 matrix, widened: they stay in the cache


def unpack(packed: Packed | Scaled, out: Tensor) -> Tensor | Scaled:
    """The dense matrix [outputs, inputs], unpacked into `out` on all cores; a dense one is it, where it lies.

    Of int8 weights the integers are made dense, and keep their scales.
    Where `out` is on a GPU and the weight is `Endor`, the GPU unpacks it.
    """
    if isinstance(packed, Scaled):
        values = unpack(packed.packed, out)
        return Scaled(Dense(packed.shape, values), packed.scales)
    if isinstance(packed, Dense):
        return packed.values
    if isinstance(packed, Codec):
        return packed.decode_into(out)
    if isinstance(packed, Endor):
        return bitmap.decompress(packed, out=out)
    return out.copy_(packed.decode())


def product(weight: Tensor | Packed | Scaled, x: Float[Tensor, " inputs"]) -> Tensor:
    """The weight, dense or as `Endor`, times a vector: fp16 and bf16 as torch does it, in their own type.

    torch has no quick product of int8 and one vector on the CPU: a few rows at a time are widened to fp32. Scales are
    applied to the product, one multiplication a row, in fp32.
    """
    if isinstance(weight, Scaled):
        return product(weight.packed, x).mul_(weight.scales)
    if isinstance(weight, Dense):
        weight = weight.values
    if isinstance(weight, Packed):
        return bitmap.matvec(weight, x)
    if weight.dtype != torch.int8:
        return weight @ x.to(weight.dtype)
    return torch.cat([rows.float() @ x for rows in weight.split(ROWS_AT_ONCE)])


def widened(weight: Packed | Scaled, scratch: UInt8[Tensor, " bytes"]) -> Tensor:
    """The weight as a product takes it: in `scratch`, of `scratch_bytes`, unless it is stored so.

    Integers are unpacked behind the place of what they stand for. To the bit what `weight.decode()` gives.
    """
    if isinstance(weight, Dense):
        return weight.values
    out, behind = _carved(scratch, weight.shape, weight.dtype)
    if isinstance(weight, Scaled):
        return dequantise(widened(weight.packed, behind), weight.scales, out=out)
    return unpack(weight, out)


def scratch_bytes(run: OpRun, unpacked: bool = False) -> int:
    """What `widened` needs for a weight; less if it comes unpacked already."""
    stored = 0 if unpacked or run.format == Dense.name else run.dense_bytes
    return stored + (run.shape[0] * run.shape[1] * run.scales_dtype.itemsize if run.scales_dtype else 0)


def _carved(scratch: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix at the start of some bytes, and the bytes behind it."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return scratch[:nbytes].view(dtype).view(shape), scratch[nbytes:]
