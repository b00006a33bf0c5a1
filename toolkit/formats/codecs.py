"""General-purpose compressors of the dense bytes, which ENDOR compares itself with (section 5.1).

The bytes are cut into frames, and each frame is compressed by itself, because these libraries unpack one frame on one
thread.
"""

from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from toolkit.formats.packed import Packed, expect

FRAME_BYTES = 4 << 20  # of the dense matrix; the compressors look back much less, and all cores get frames


@dataclass(frozen=True, eq=False)
class Codec(Packed):
    """The row-major bytes of the dense matrix as compressed frames. Every bit is kept; −0.0 stays −0.0.

    Frame i lies at `offsets[i]` to `offsets[i + 1]` of `frames`. Each frame holds 4 MiB of the matrix, the last one
    what is left.
    """

    version = 2  # version 1 was a single frame

    shape: tuple[int, int]
    dtype: torch.dtype
    frames: UInt8[Tensor, " bytes"]
    offsets: Int64[Tensor, " count_plus_1"]

    @staticmethod
    @abstractmethod
    def compress(data: memoryview) -> bytes:
        """Compress to one frame, which tells its own length."""

    @staticmethod
    @abstractmethod
    def unpack(frame: memoryview, out: memoryview) -> None:
        """Fill `out`. Raises `ValueError` if the frame is broken or holds another number of bytes."""

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Compress a matrix, on all cores."""
        parts = _each(cls.compress, _cut(weight))
        offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
        frames = torch.from_numpy(np.frombuffer(bytearray().join(parts), np.uint8))
        return cls(tuple(weight.shape), weight.dtype, frames, offsets)

    def _fill(self, out: Tensor) -> None:
        """Raises `ValueError` for a broken frame."""
        data, ends = memoryview(self.frames.numpy()), self.offsets.tolist()
        frames = [data[start:end] for start, end in pairwise(ends)]
        _each(self.unpack, frames, _cut(out))

    def check(self) -> None:
        """The frames unpack to as many bytes as the shape asks for."""
        expect("frames", self.frames, torch.uint8, (self.frames.numel(),))
        nbytes = self.shape[0] * self.shape[1] * self.dtype.itemsize
        expect("offsets", self.offsets, torch.int64, (-(-nbytes // FRAME_BYTES) + 1,))
        ends = self.offsets
        if ends[0] != 0 or ends[-1] != self.frames.numel() or (ends.diff() < 0).any():
            raise ValueError(f"offsets do not rise from 0 to the {self.frames.numel()} bytes of the frames")
        self.decode()


class Zstd(Codec):
    """Zstandard at its default level, 3."""

    name = "zstd"

    @staticmethod
    def compress(data: memoryview) -> bytes:
        """One frame."""
        import zstandard

        return zstandard.ZstdCompressor(level=3).compress(data)

    @staticmethod
    def unpack(frame: memoryview, out: memoryview) -> None:
        """Unpack straight into `out`. The library's one-call function allocates its result, which doubles the time."""
        import zstandard

        try:
            _expect_size(zstandard.frame_content_size(frame), out)
            with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
                _expect_size(reader.readinto(out), out)
        except zstandard.ZstdError as error:
            raise ValueError(f"broken zstd frame: {error}") from error


class LZ4(Codec):
    """LZ4 frames at the default level."""

    name = "lz4"

    @staticmethod
    def compress(data: memoryview) -> bytes:
        """One frame."""
        import lz4.frame

        return lz4.frame.compress(data)

    @staticmethod
    def unpack(frame: memoryview, out: memoryview) -> None:
        """Unpack through memory that the library allocates; it has no other way."""
        import lz4.frame

        try:
            _expect_size(lz4.frame.get_frame_info(frame)["content_size"], out)
            out[:] = lz4.frame.decompress(frame)
        except (RuntimeError, EOFError) as error:
            raise ValueError(f"broken lz4 frame: {error}") from error


def _cut(matrix: Tensor) -> list[memoryview]:
    """The bytes of a matrix, frame by frame."""
    data = memoryview(matrix.view(-1).view(torch.uint8).numpy())
    return [data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES)]


def _each(work, *arguments: list) -> list:
    """Call `work` for each frame on as many threads as torch uses; the compressors release the interpreter's lock."""
    if len(arguments[0]) < 2:
        return list(map(work, *arguments))
    with ThreadPoolExecutor(min(len(arguments[0]), torch.get_num_threads())) as pool:
        return list(pool.map(work, *arguments))


def _expect_size(found: int, out: memoryview) -> None:
    if found != len(out):
        raise ValueError(f"the frame holds {found} bytes; the shape asks for {len(out)}")
