"""General-purpose compressors over the dense bytes: what ENDOR compares itself with (section 5.1)."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.formats.packed import Packed, expect


@dataclass(frozen=True, eq=False)
class Codec(Packed):
    """The row-major bytes of the dense matrix as one compressed frame; every bit is kept, −0.0 included."""

    shape: tuple[int, int]
    dtype: torch.dtype
    frame: UInt8[Tensor, " bytes"]

    @staticmethod
    @abstractmethod
    def compress(data: memoryview) -> bytes:
        """One frame that tells its own length."""

    @staticmethod
    @abstractmethod
    def decompress(frame: memoryview, size: int) -> bytes:
        """`size` bytes. Raises `ValueError` if the frame holds another number of bytes or is broken."""

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Compress a matrix."""
        frame = cls.compress(memoryview(_bytes(weight)))
        return cls(tuple(weight.shape), weight.dtype, torch.from_numpy(np.frombuffer(frame, np.uint8).copy()))

    def decode(self) -> Tensor:
        """The dense matrix."""
        dense = torch.empty(self.shape, dtype=self.dtype)
        data = self.decompress(memoryview(self.frame.numpy()), dense.nbytes)
        _bytes(dense)[:] = np.frombuffer(data, np.uint8)
        return dense

    def check(self) -> None:
        """The frame can be decompressed to the size that the shape asks for."""
        expect("frame", self.frame, torch.uint8, (self.frame.numel(),))
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
    def decompress(frame: memoryview, size: int) -> bytes:
        """`size` bytes."""
        import zstandard

        try:
            found = zstandard.frame_content_size(frame)
            if found != size:
                raise ValueError(f"the frame holds {found} bytes; the shape asks for {size}")
            return zstandard.ZstdDecompressor().decompress(frame)
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
    def decompress(frame: memoryview, size: int) -> bytes:
        """`size` bytes."""
        import lz4.frame

        try:
            found = lz4.frame.get_frame_info(frame)["content_size"]
            if found != size:
                raise ValueError(f"the frame holds {found} bytes; the shape asks for {size}")
            return lz4.frame.decompress(frame)
        except (RuntimeError, EOFError) as error:
            raise ValueError(f"broken lz4 frame: {error}") from error


def _bytes(matrix: Tensor) -> np.ndarray:
    return matrix.view(-1).view(torch.uint8).numpy()
