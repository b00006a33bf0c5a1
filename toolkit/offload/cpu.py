"""What the CPU does with a weight under each method: unpack it, multiply it with one token's vector."""

import torch
from jaxtyping import Float32
from torch import Tensor

from toolkit.formats import Packed
from toolkit.formats.codecs import Codec
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.kernels import bitmap

ROWS_AT_ONCE = 64  # of an int8 matrix, widened: they stay in the cache


def unpack(packed: Packed, out: Tensor) -> Tensor:
    """The dense matrix [outputs, inputs], unpacked into `out` on all cores; a dense one is it, where it lies.

    Where `out` is on a GPU and the weight is `Endor`, the GPU unpacks it.
    """
    if isinstance(packed, Dense):
        return packed.values
    if isinstance(packed, Codec):
        return packed.decode_into(out)
    if isinstance(packed, Endor):
        return bitmap.decompress(packed, out=out)
    return out.copy_(packed.decode())


def product(weight: Tensor | Packed, x: Float32[Tensor, " inputs"]) -> Tensor:
    """The weight, dense or as `Endor`, times a vector: fp16 and bf16 as torch does it, in their own type.

    torch has no quick product of int8 and one vector on the CPU: a few rows at a time are widened to fp32.
    """
    if isinstance(weight, Packed):
        return bitmap.matvec(weight, x)
    if weight.dtype != torch.int8:
        return weight @ x.to(weight.dtype)
    return torch.cat([rows.float() @ x for rows in weight.split(ROWS_AT_ONCE)])
