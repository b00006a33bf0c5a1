"""SpQR's dense part: 3-bit codes in 64-bit words, as the library spqr_quant stores them.

The matrix is cut into tiles of 16 × 16. A word holds one row of a tile, lowest bits first:

    bits  0–2    code of the row's scale
    bits  3–5    code of the row's zero point
    bits  6–53   sixteen codes of weights, 3 bits each, the lowest column first
    bits 54–61   a byte of the tile's second-order statistics
    bits 62–63   zero

The second-order statistics of a tile are four fp16 numbers: scale of the scales, scale of the zero points, zero point
of the scales, zero point of the zero points. They form one 64-bit number, the first in its lowest bits. Row k of the
tile carries byte k // 2, so each byte is stored twice (thesis, section 3.1).

Words are ordered by tile row, tile column, row in the tile. A matrix whose sides are no multiples of 16 is padded:
the weights' codes beyond its last column are 0, and so are all codes of the rows beyond its last row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float16, Int64, UInt8
from torch import Tensor

from toolkit.kernels.engine.tensors import expect
from toolkit.kernels.spqr.shared import LEVELS, SECOND_ORDER, SPARE, TILE, WEIGHTS, ZERO

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Codes:
    """The choices of a quantiser: the codes, 0 to 7, of a matrix, and the statistics of its tiles. On the CPU.

    Raises `ValueError` for tensors of other shapes or types, and for a code above 7.
    """

    weights: UInt8[Tensor, "rows columns"]
    scales: UInt8[Tensor, "rows wide"]  # wide = ⌈columns / 16⌉: each row has one for every 16 columns
    zeros: UInt8[Tensor, "rows wide"]
    second_order: Float16[Tensor, "tall wide 4"]  # tall = ⌈rows / 16⌉; in the order that the module describes

    def __post_init__(self):
        """Refuse what a word cannot hold."""
        rows, columns = self.shape
        tall, wide = tiles(self.shape)
        expect("weights", self.weights, torch.uint8, (rows, columns), CPU)
        expect("scales", self.scales, torch.uint8, (rows, wide), CPU)
        expect("zeros", self.zeros, torch.uint8, (rows, wide), CPU)
        expect("second_order", self.second_order, torch.float16, (tall, wide, 4), CPU)
        for name in ("weights", "scales", "zeros"):
            found = getattr(self, name)
            if found.numel() and int(found.max()) >= LEVELS:
                raise ValueError(f"{name} hold the code {int(found.max())}; expected 0 to {LEVELS - 1}")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return tuple(self.weights.shape)


def tiles(shape: tuple[int, int]) -> tuple[int, int]:
    """How many tiles lie below and beside each other."""
    return -(-shape[0] // TILE), -(-shape[1] // TILE)


def pack(codes: Codes) -> Int64[Tensor, "tall wide 16"]:
    """The words of a matrix."""
    tall, wide = tiles(codes.shape)
    weights = np.zeros((tall * TILE, wide * TILE), np.uint8)
    weights[: codes.shape[0], : codes.shape[1]] = codes.weights.numpy()
    weights = weights.reshape(tall, TILE, wide, TILE).transpose(0, 2, 1, 3)
    words = _by_tile(codes.scales, tall) | _by_tile(codes.zeros, tall) << np.uint64(ZERO)
    for column in range(TILE):
        words |= weights[..., column].astype(np.uint64) << np.uint64(WEIGHTS + 3 * column)
    words |= second_order_bytes(codes.second_order).astype(np.uint64) << np.uint64(SECOND_ORDER)
    packed = torch.empty(words.shape, dtype=torch.int64)  # an empty array of NumPy's has strides of 0
    packed.numpy().view(np.uint64)[:] = words
    return packed


def unpack(words: Int64[Tensor, "tall wide 16"], shape: tuple[int, int]) -> Codes:
    """The codes that these words hold, without the padding."""
    expect("words", words, torch.int64, (*tiles(shape), TILE), CPU)
    bits = words.numpy().view(np.uint64)
    rows, columns = shape
    weights = np.stack([_field(bits, WEIGHTS + 3 * column) for column in range(TILE)], axis=-1)
    weights = weights.transpose(0, 2, 1, 3).reshape(bits.shape[0] * TILE, bits.shape[1] * TILE)
    scales, zeros = (
        _field(bits, start).transpose(0, 2, 1).reshape(bits.shape[0] * TILE, bits.shape[1]) for start in (0, ZERO)
    )
    found = [np.ascontiguousarray(part) for part in (weights[:rows, :columns], scales[:rows], zeros[:rows])]
    return Codes(*map(torch.from_numpy, found), second_order(words))


def second_order(words: Int64[Tensor, "tall wide 16"]) -> Float16[Tensor, "tall wide 4"]:
    """The four statistics of each tile, from the even rows' bytes."""
    carried = (words.numpy().view(np.uint64)[..., ::2] >> np.uint64(SECOND_ORDER)).astype(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(carried).reshape(-1).view(np.float16).reshape(*carried.shape[:2], 4))


def second_order_bytes(statistics: Float16[Tensor, "tall wide 4"]) -> UInt8[np.ndarray, "tall wide 16"]:
    """The byte that each row of each tile carries."""
    return statistics.contiguous().numpy().view(np.uint8).reshape(*statistics.shape[:2], 8).repeat(2, axis=-1)


def check(words: Int64[Tensor, "tall wide 16"], shape: tuple[int, int]) -> None:
    """Raise `ValueError` unless the words are what `pack` makes of a matrix of this shape with finite statistics."""
    expect("words", words, torch.int64, (*tiles(shape), TILE), CPU)
    bits, statistics = words.numpy().view(np.uint64), second_order(words)
    if np.any(bits >> np.uint64(SPARE)):
        raise ValueError(f"a word has bits set above bit {SPARE - 1}")
    if not np.array_equal((bits >> np.uint64(SECOND_ORDER)).astype(np.uint8), second_order_bytes(statistics)):
        raise ValueError("two rows of a tile carry different copies of the same byte of its statistics")
    if not bool(statistics.isfinite().all()):
        tall, wide = (~statistics.isfinite().all(dim=-1)).nonzero()[0].tolist()
        raise ValueError(f"the statistics of tile ({tall}, {wide}) are not finite")
    codes = bits & np.uint64((1 << SECOND_ORDER) - 1)
    if shape[0] % TILE and np.any(codes[-1, :, shape[0] % TILE :]):
        raise ValueError(f"rows beyond the last, {shape[0] - 1}, hold codes")
    if shape[1] % TILE and np.any(codes[:, -1] >> np.uint64(WEIGHTS + 3 * (shape[1] % TILE))):
        raise ValueError(f"columns beyond the last, {shape[1] - 1}, hold codes")


def _by_tile(codes: UInt8[Tensor, "rows wide"], tall: int) -> np.ndarray:
    """One code a word, [tall, wide, 16]."""
    padded = np.zeros((tall * TILE, codes.shape[1]), np.uint64)
    padded[: len(codes)] = codes.numpy()
    return np.ascontiguousarray(padded.reshape(tall, TILE, codes.shape[1]).transpose(0, 2, 1))


def _field(bits: np.ndarray, start: int) -> np.ndarray:
    return (bits >> np.uint64(start)).astype(np.uint8) & np.uint8(LEVELS - 1)
