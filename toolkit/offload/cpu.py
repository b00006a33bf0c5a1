"""What the CPU does with a weight under each method: pack it, unpack it, multiply it with one token's vector."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from toolkit.formats import Packed, encode
from toolkit.formats.codecs import Zstd
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.formats.scaled import Scaled
from toolkit.kernels import bitmap
from toolkit.quantization import dequantise
from toolkit.storage.runs import OpRun

ROWS_AT_ONCE = 64  # of an int8 matrix, widened: they stay in the cache


def pack(form: str, weight: Tensor, scales: Float[Tensor, " outputs"] | None = None) -> list[Packed | Scaled]:
    """The weight in a format, as blocks of rows that are unpacked each by itself; int8 ones with their scales.

    One block, but for zstd, which is one thread a frame: as many as there are cores. Raises `UserError` as `encode`.
    """
    count = (os.cpu_count() or 1) if form == "zstd" else 1
    packed = [encode(form, block) for block in weight.chunk(count)]
    return packed if scales is None else [*map(Scaled, packed, scales.chunk(count))]


def unpack(parts: Sequence[Packed | Scaled], out: Tensor) -> Tensor | Scaled:
    """The dense matrix [outputs, inputs], unpacked into `out` on all cores; dense parts are it, where they lie.

    Of int8 parts the integers are made dense, and keep their scales.
    """
    if isinstance(parts[0], Scaled):
        values = unpack([part.packed for part in parts], out)
        return Scaled(Dense(tuple(values.shape), values), torch.cat([part.scales for part in parts]))
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


def product(weight: Tensor | Packed | Scaled, x: Float32[Tensor, " inputs"]) -> Tensor:
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
    return unpack([weight], out)


def scratch_bytes(run: OpRun) -> int:
    """What `widened` needs for a weight."""
    stored = 0 if run.format == Dense.name else run.dense_bytes
    return stored + (run.shape[0] * run.shape[1] * run.scales_dtype.itemsize if run.scales_dtype else 0)


def _carved(scratch: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix at the start of some bytes, and the bytes behind it."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return scratch[:nbytes].view(dtype).view(shape), scratch[nbytes:]


def _inflate(part: Zstd, out: Tensor) -> None:
    """Into memory at hand: the library's one call allocates what it returns, which costs about as much again.

    Raises `ValueError` for a frame that holds fewer bytes.
    """
    import zstandard

    target = memoryview(out.view(-1).view(torch.uint8).numpy())
    size = zstandard.ZstdDecompressor().stream_reader(memoryview(part.frame.numpy())).readinto(target)
    if size != target.nbytes:
        raise ValueError(f"a zstd frame of {size} bytes; expected {target.nbytes}")
