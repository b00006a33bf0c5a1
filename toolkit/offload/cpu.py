"""What the CPU does with a weight under each method: pack it, unpack it, multiply it with one token's vector."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Float32
from torch import Tensor

from toolkit.formats import Packed, encode
from toolkit.formats.codecs import Zstd
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.kernels import bitmap

ROWS_AT_ONCE = 64  # of an int8 matrix, widened: they stay in the cache


def pack(form: str, weight: Tensor) -> list[Packed]:
    """The weight in a format, as blocks of rows that are unpacked each by itself.

    One block, but for zstd, which is one thread a frame: as many as there are cores. Raises `UserError` as `encode`.
    """
    blocks = weight.chunk(os.cpu_count() or 1) if form == "zstd" else [weight]
    return [encode(form, block) for block in blocks]


def unpack(parts: Sequence[Packed], out: Tensor) -> Tensor:
    """The dense matrix [outputs, inputs], unpacked into `out` on all cores; dense parts are it, where they lie."""
    if isinstance(parts[0], Dense):
        return parts[0].values
    if isinstance(parts[0], Zstd):
        blocks = out.split([part.shape[0] for part in parts])
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(_inflate, parts, blocks))
        return out
    if isinstance(parts[0], Endor):
        return bitmap.decompress(parts[0], out=out)
    return out.copy_(parts[0].decode())


def product(weight: Tensor | Packed, x: Float32[Tensor, " inputs"]) -> Tensor:
    """The weight, dense or as `Endor`, times a vector: fp16 and bf16 as torch does it, in their own type.

    torch has no quick product of int8 and one vector on the CPU: a few rows at a time are widened to fp32.
    """
    if isinstance(weight, Packed):
        return bitmap.matvec(weight, x)
    if weight.dtype != torch.int8:
        return weight @ x.to(weight.dtype)
    return torch.cat([rows.float() @ x for rows in weight.split(ROWS_AT_ONCE)])


def _inflate(part: Zstd, out: Tensor) -> None:
    """Into memory at hand: the library's one call allocates what it returns, which costs about as much again.

    Raises `ValueError` for a frame that holds fewer bytes.
    """
    import zstandard

    target = memoryview(out.view(-1).view(torch.uint8).numpy())
    size = zstandard.ZstdDecompressor().stream_reader(memoryview(part.frame.numpy())).readinto(target)
    if size != target.nbytes:
        raise ValueError(f"a zstd frame of {size} bytes; expected {target.nbytes}")
