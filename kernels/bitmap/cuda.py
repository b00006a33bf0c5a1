"""The bitmap kernels for CUDA GPUs.

A warp takes a block of 4096 columns of a row. Each lane loads four words of the bitmap and counts their bits. The
running sum over the lanes is the number of the block's values before each word; it goes to shared memory beside the
words. Then the warp walks along the block. At each step a lane takes the columns that fill eight bytes (four in
fp16). Their first value lies after the values before their word and those of the word's lower bits. So neighbouring
lanes read neighbouring values, all from a few cache lines, and each writes its eight bytes at once.

A lane treats its words as empty if their values would lie outside `values`: packed matrices come from files, and no
contents may make a kernel read elsewhere.

Elements are handled as bits. Positions of values are 64-bit. Kernels run on torch's current stream. In Numba's
simulator (NUMBA_ENABLE_CUDASIM=1), tensors are on the CPU.
"""

from functools import cache
from weakref import WeakKeyDictionary

import numba
import torch
from numba import cuda, float32, int32, uint32, uint64
from torch import Tensor

from toolkit.kernels.bitmap.layout import Bitmap, block_count
from toolkit.kernels.bitmap.shared import BLOCK, WORD
from toolkit.kernels.engine.gpu import (
    LANES,
    TO_FLOAT32,
    WARPS,
    Launch,
    address,
    as_array,
    item,
    multiprocessors,
    prefetch,
    run,
    sum_all,
    sum_before,
    sync,
)
from toolkit.kernels.engine.tensors import BITS

WORDS = BLOCK // WORD  # of a block
WORDS_PER_LANE = WORDS // LANES
LOW = uint64(0xFFFFFFFF)
LANE_BYTES = 8  # of the dense matrix that a lane makes at a step
AHEAD = LANES * WORD  # columns between where values are used and where they are fetched
ROWS = 4  # rows that a warp multiplies at once, which share what it reads of x; more would need too many registers
BUSY_WARPS = 12  # warps that keep a multiprocessor busy; twice as many fit, but a second round would be half empty
MAX_GRID_Y = 65_535
VECTORS = 16  # vectors that one pass over the matrix multiplies, at most

_STORED = WeakKeyDictionary()


def decompress(encoded: Bitmap, out: Tensor) -> None:
    """Fill `out` [rows, columns]. The caller has checked the arguments."""
    rows, columns = encoded.shape
    if out.numel() == 0:
        return
    per_lane = LANE_BYTES // out.itemsize
    aligned = columns % per_lane == 0 and out.data_ptr() % LANE_BYTES == 0
    launch = decompress_launch(rows, columns)
    _run(decompress_kernel(encoded.dtype, aligned), launch, encoded, _by_eight(out) if aligned else _bits(out), columns)


def matvec(encoded: Bitmap, x: Tensor, out: Tensor) -> None:
    """Fill `out` [batch, rows] with products with `x` [batch, columns]. The caller has checked the arguments."""
    rows, columns = encoded.shape
    if encoded.values.numel() == 0 or out.numel() == 0:
        out.zero_()
        return
    x = _padded(x, encoded.dtype)
    launch = matvec_launch(rows, columns, multiprocessors(encoded.device))
    for some, result in zip(x.split(VECTORS), out.split(VECTORS), strict=True):
        _run(matvec_kernel(encoded.dtype, x.dtype, len(some)), launch, encoded, _by_eight(some), result, columns)


def decompress_launch(rows: int, columns: int) -> Launch:
    """A warp for each block of each row. Rows lie along x, which has room for 2³¹ thread blocks.

    Raises `ValueError` beyond 268 million columns, for which there is no room along y.
    """
    blocks, warps = block_count(columns), min(WARPS, rows)
    if blocks > MAX_GRID_Y:
        raise ValueError(f"{columns} columns are more than a GPU's grid has room for")
    return Launch((-(-rows // warps), blocks), (LANES, warps, 1))


def matvec_launch(rows: int, columns: int, multiprocessors: int) -> Launch:
    """A warp for each four rows, or several warps (along y) where one would leave the GPU idle.

    Their number is a power of two. They take the rows' blocks in turn and add their sums at the end in a fixed order,
    so that the result depends on the shape and the GPU, not on the run.
    """
    groups = -(-rows // ROWS)
    split = 1
    while 2 * split <= min(block_count(columns), WARPS) and groups * split < BUSY_WARPS * multiprocessors:
        split *= 2
    side_by_side = min(WARPS // split, groups)
    return Launch((-(-groups // side_by_side), 1), (LANES, split, side_by_side))


ELEMENT = {1: numba.uint8, 2: numba.uint16, 4: numba.uint32}  # by width in bytes


@cuda.jit(device=True, inline="always")
def tabulate(bitmap, row, block, table, slot, size, place, distance):
    """Set `table[slot]`, for each word of the block: the number of values before it << 32 | its bits.

    The block's first value is `distance` behind `place`, and there are `size` values in all.
    """
    lane_word = uint64(cuda.threadIdx.x * WORDS_PER_LANE)
    words = cuda.local.array(WORDS_PER_LANE, uint32)
    count = int32(0)
    for index in range(WORDS_PER_LANE):
        words[index] = uint32(0)
        word_place = uint64(block) * uint64(WORDS) + lane_word + uint64(index)
        if word_place < bitmap.shape[1]:
            words[index] = bitmap[row, word_place]
        count = int32(count + cuda.popc(words[index]))
    before = sum_before(count)
    end = uint64(distance) + uint64(before) + uint64(count)
    within = uint64(place) <= uint64(size) and end <= uint64(size) - uint64(place)
    for index in range(WORDS_PER_LANE):
        word = words[index] if within else uint32(0)
        table[slot, lane_word + uint64(index)] = uint64(before) << uint64(32) | uint64(word)
        before = int32(before + cuda.popc(words[index]))


@cuda.jit(device=True, inline="always")
def value_place(row_offsets, block_offsets, row, block):
    """The position of a block's first value."""
    return uint64(row_offsets[row]) + uint64(block_offsets[row, block])


@cuda.jit(device=True, inline="always")
def columns_left(columns, block):
    """The number of columns from here to the end of the block."""
    return uint32(min(uint64(BLOCK), uint64(columns) - uint64(block) * uint64(BLOCK)))


@cuda.jit(device=True, inline="always")
def values_before(entry, mask):
    """The number of the block's values before the first bit of the word outside `mask`."""
    return uint32(uint32(entry >> uint64(32)) + uint32(cuda.popc(uint32(entry & uint64(mask)))))


@cuda.jit(device=True, inline="always")
def fetch(values, start, begin, table, slot, column, left):
    """Prefetch the values of the 1024 columns from `column` on. Each lane fetches those of one word, about 32 bytes."""
    column = uint32(column + cuda.threadIdx.x * WORD)
    if column < left:
        entry = table[slot, column // uint32(WORD)]
        if entry & LOW:  # else there may be no value left
            prefetch(values, start, uint32(begin + uint32(entry >> uint64(32))))


@cache
def decompress_kernel(dtype: torch.dtype, aligned: bool):
    """The kernel that fills `dense`: its bits, by element, or if `aligned` by eight bytes of one row."""
    per_lane, width = LANE_BYTES // dtype.itemsize, 8 * dtype.itemsize

    @cuda.jit
    def decompress_bitmap(bitmap, row_offsets, block_offsets, values, dense, columns):
        table = cuda.shared.array((WARPS, WORDS), uint64)
        lane, warp = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        row, block = uint64(cuda.blockIdx.x * cuda.blockDim.y + warp), uint64(cuda.blockIdx.y)
        if row >= bitmap.shape[0]:
            return
        place_of_first = value_place(row_offsets, block_offsets, row, block)
        tabulate(bitmap, row, block, table, warp, values.size, place_of_first, uint32(0))
        sync()
        start = address(values, place_of_first)
        shift = uint32(lane * per_lane % WORD)
        earlier = uint32((uint64(1) << uint64(shift)) - uint64(1))
        left, column = columns_left(columns, block), uint32(lane * per_lane)
        fetch(values, start, uint32(0), table, warp, uint32(0), left)
        while column < left:
            if column % uint32(AHEAD) < uint32(LANES * per_lane):
                fetch(values, start, uint32(0), table, warp, uint32(column - lane * per_lane + AHEAD), left)
            entry = table[warp, column // uint32(WORD)]
            at, word = values_before(entry, earlier), uint32(entry & LOW) >> shift
            packed = uint64(0)
            for index in range(per_lane):
                if word >> uint32(index) & uint32(1):
                    packed |= uint64(item(values, start, at)) << uint64(index * width)
                    at = uint32(at + uint32(1))
            place = block * uint64(BLOCK) + uint64(column)
            if aligned:
                dense[row, place // uint64(per_lane)] = packed
            else:
                for index in range(min(uint32(per_lane), uint32(left - column))):
                    dense[row, place + uint64(index)] = packed >> uint64(index * width) & uint64((1 << width) - 1)
            column = uint32(column + uint32(LANES * per_lane))

    return decompress_bitmap


@cuda.jit(device=True, inline="always")
def tabulate_rows(bitmap, row_offsets, block_offsets, size, first_row, last_row, block, table, slot, begin):
    """`tabulate` for each row; `begin` gets the distances to their first values from that of the first row.

    Past the end of the matrix the last row is repeated; `add_up` drops those sums. Returns the position of the first
    value.
    """
    place = value_place(row_offsets, block_offsets, min(first_row, last_row), block)
    for r in range(ROWS):
        row = min(first_row + uint64(r), last_row)
        begin[r] = uint32(value_place(row_offsets, block_offsets, row, block) - place)
        tabulate(bitmap, row, block, table, slot + uint32(r), size, place, begin[r])
    return place


@cuda.jit(device=True, inline="always")
def fetch_rows(values, start, begin, table, slot, column, left):
    """`fetch` for each row."""
    for r in range(ROWS):
        fetch(values, start, begin[r], table, slot + uint32(r), column, left)


@cuda.jit(device=True, inline="always")
def locate(table, slot, column, shift, begin, at, word):
    """For each row, the distance `at` of the first value from `column` on, and the `word`, that column's bit lowest."""
    earlier = uint32((uint64(1) << uint64(shift)) - uint64(1))
    for r in range(ROWS):
        entry = table[slot + uint32(r), column // uint32(WORD)]
        at[r] = uint32(begin[r] + values_before(entry, earlier))
        word[r] = uint32(entry & LOW) >> shift


@cuda.jit(device=True, inline="always")
def add_up(total, batch, sums, warp, first_row, last_row, y):
    """Sum over the lanes, then over the warps that share the rows, in their order; set `y`."""
    for r in range(ROWS):
        for b in range(batch):
            whole = sum_all(total[r, b])
            if cuda.threadIdx.x == 0:
                sums[warp, r * batch + b] = whole
    cuda.syncthreads()
    if cuda.threadIdx.y == 0:
        for result in range(cuda.threadIdx.x, ROWS * batch, LANES):
            whole = float32(0)
            for other in range(cuda.blockDim.y):
                whole += sums[warp + other, result]
            row = first_row + uint64(result // batch)
            if row <= last_row:
                y[result % batch, row] = whole


@cache
def matvec_kernel(dtype: torch.dtype, x_dtype: torch.dtype, batch: int):
    """The kernel that sets `y[vector, row] = Σ w[row, column] · x[vector, column]`, summed in fp32.

    A warp works on four rows at once. Warps of one `threadIdx.z` share the same rows and take their blocks in turn. `x`
    holds bits in units of eight bytes, enough for all columns.
    """
    per_lane, per_piece = LANE_BYTES // dtype.itemsize, LANE_BYTES // x_dtype.itemsize
    pieces, x_width, x_bits = per_lane // per_piece, 8 * x_dtype.itemsize, ELEMENT[x_dtype.itemsize]
    slots, results = WARPS * ROWS, ROWS * batch
    to_float32, x_to_float32 = TO_FLOAT32[dtype], TO_FLOAT32[x_dtype]

    @cuda.jit
    def multiply_bitmap(bitmap, row_offsets, block_offsets, values, x, y, columns):
        table = cuda.shared.array((slots, WORDS), uint64)
        sums = cuda.shared.array((WARPS, results), float32)
        begin, at, word = cuda.local.array(ROWS, uint32), cuda.local.array(ROWS, uint32), cuda.local.array(ROWS, uint32)
        some, factor = cuda.local.array(batch, uint64), cuda.local.array(batch, float32)
        total = cuda.local.array((ROWS, batch), float32)
        for r in range(ROWS):
            for b in range(batch):
                total[r, b] = float32(0)
        first_column = uint32(cuda.threadIdx.x * per_lane)
        warp = uint32(cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y)
        slot = uint32(warp * uint32(ROWS))
        first_row = uint64(cuda.blockIdx.x * cuda.blockDim.z + cuda.threadIdx.z) * uint64(ROWS)
        last_row = uint64(bitmap.shape[0] - 1)
        for block in range(cuda.threadIdx.y, block_offsets.shape[1], cuda.blockDim.y):
            sync()
            size = values.size
            place = tabulate_rows(
                bitmap, row_offsets, block_offsets, size, first_row, last_row, block, table, slot, begin
            )
            sync()
            start = address(values, place)
            x_start = address(x, uint64(block) * uint64(BLOCK // per_piece))
            left, column = columns_left(columns, block), first_column
            fetch_rows(values, start, begin, table, slot, uint32(0), left)
            while column < left:
                if column % uint32(AHEAD) < uint32(LANES * per_lane):
                    fetch_rows(values, start, begin, table, slot, uint32(column - first_column + AHEAD), left)
                locate(table, slot, column, uint32(first_column % WORD), begin, at, word)
                for piece in range(pieces):
                    for b in range(batch):
                        further = uint32(b * x.shape[1] + column // uint32(per_piece) + piece)
                        some[b] = item(x, x_start, further)
                    for index in range(per_piece):
                        for b in range(batch):
                            factor[b] = x_to_float32(x_bits(some[b] & uint64((1 << x_width) - 1)))
                            some[b] >>= uint64(x_width)
                        for r in range(ROWS):
                            if word[r] >> uint32(piece * per_piece + index) & uint32(1):
                                weight = to_float32(item(values, start, at[r]))
                                at[r] = uint32(at[r] + uint32(1))
                                for b in range(batch):
                                    total[r, b] += weight * factor[b]
                column = uint32(column + uint32(LANES * per_lane))
        add_up(total, batch, sums, warp, first_row, last_row, y)

    return multiply_bitmap


def _padded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` with whole eight bytes for every lane, in a type that the kernel for weights of `dtype` takes."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.itemsize < dtype.itemsize:
        x = x.to(torch.float32)
    missing = -x.shape[1] % (LANE_BYTES // dtype.itemsize)
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    return x if x.data_ptr() % LANE_BYTES == 0 else x.clone()


def _run(kernel, launch: Launch, encoded: Bitmap, *arguments) -> None:
    run(kernel, launch, encoded.device, *_stored(encoded), *arguments)


def _stored(encoded: Bitmap) -> tuple:
    """The packed matrix as arrays for the kernels, kept with it: wrapping takes longer than some kernels."""
    if encoded not in _STORED:
        words, values = encoded.bitmap.view(torch.uint32), _bits(encoded.values)
        _STORED[encoded] = tuple(map(as_array, (words, encoded.row_offsets, encoded.block_offsets, values)))
    return _STORED[encoded]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.dtype])


def _by_eight(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint64)
