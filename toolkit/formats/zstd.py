"""Zstandard, a general-purpose compressor of the dense bytes: a baseline of ENDOR (section 5.1).

The bytes are cut into frames, and each frame is compressed by itself, because the library unpacks one frame on one
thread.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from toolkit.extras import extra
from toolkit.files import check_memory
from toolkit.formats.packed import Packed, expect, expect_rising

FRAME_BYTES = 4 << 20  # of the dense matrix; the compressor looks back much less, and all cores get frames
WINDOW_BYTES = FRAME_BYTES  # how far back a frame may look when it is unpacked: the library takes as much memory


@dataclass(frozen=True, eq=False)
class Zstd(Packed):
    """The row-major bytes of the dense matrix as frames of Zstandard at level 3. Every bit is kept; −0.0 stays −0.0.

    Frame i lies at `offsets[i]` to `offsets[i + 1]` of `frames`. Each frame holds 4 MiB of the matrix, the last one
    what is left.
    """

    name = "zstd"
    version = 2  # version 1 was a single frame

    shape: tuple[int, int]
    dtype: torch.dtype
    frames: UInt8[Tensor, " bytes"]
    offsets: Int64[Tensor, " count_plus_1"]

    def __post_init__(self):
        """Raise `ValueError` for tensors of types or shapes that do not fit."""
        expect("frames", self.frames, torch.uint8, (self.frames.numel(),))
        expect("offsets", self.offsets, torch.int64, (-(-self.dense_bytes // FRAME_BYTES) + 1,))

    @staticmethod
    def compress(data: memoryview) -> bytes:
        """One frame."""
        with extra("lab"):
            import zstandard

        return zstandard.ZstdCompressor(level=3).compress(data)

    @staticmethod
    def unpack(frame: memoryview, out: memoryview) -> None:
        """Fill `out`. Raises `ValueError` if the frame is broken or holds another number of bytes.

        A frame of a few bytes can unpack to gigabytes, so unpacking stops one byte behind the end of `out`. The
        library's one-call function allocates its result, which doubles the time.
        """
        with extra("lab"):
            import zstandard

        try:
            _expect_size(zstandard.frame_content_size(frame), out)
            decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
            with decompressor.stream_reader(frame, read_across_frames=False) as reader:
                _expect_size(reader.readinto(out) + len(reader.read(1)), out)
        except zstandard.ZstdError as error:
            raise ValueError(f"broken zstd frame: {error}") from error

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Compress a matrix, on all cores."""
        parts = _each(cls.compress, _cut(weight))
        offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
        frames = torch.from_numpy(np.frombuffer(bytearray().join(parts), np.uint8))
        return cls(tuple(weight.shape), weight.dtype, frames, offsets)

    def _fill(self, out: Tensor) -> None:
        """Raises `ValueError` for a broken frame."""
        _each(self.unpack, self._cut_frames(), _cut(out))

    def check(self) -> None:
        """The frames unpack to as many bytes as the shape asks for. One is in memory at a time."""
        check_memory(self.dense_bytes, f"a dense matrix of {list(self.shape)}")
        scratch, left = memoryview(bytearray(min(FRAME_BYTES, self.dense_bytes))), self.dense_bytes
        for frame in self._cut_frames():
            self.unpack(frame, scratch[:left])
            left -= min(left, FRAME_BYTES)

    def _cut_frames(self) -> list[memoryview]:
        expect_rising("offsets", self.offsets, self.frames.numel(), "the bytes of the frames")
        data = memoryview(self.frames.numpy())
        return [data[start:end] for start, end in pairwise(self.offsets.tolist())]


def _cut(matrix: Tensor) -> list[memoryview]:
    """The bytes of a matrix, frame by frame."""
    data = memoryview(matrix.view(-1).view(torch.uint8).numpy())
    return [data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES)]


def _each(work, *arguments: list) -> list:
    """Call `work` for each frame on as many threads as torch uses; the compressor releases the interpreter's lock."""
    if len(arguments[0]) < 2:
        return list(map(work, *arguments))
    with ThreadPoolExecutor(min(len(arguments[0]), torch.get_num_threads())) as pool:
        return list(pool.map(work, *arguments))


def _expect_size(found: int, out: memoryview) -> None:
    if found != len(out):
        raise ValueError(f"the frame holds {found} bytes; the shape asks for {len(out)}")
