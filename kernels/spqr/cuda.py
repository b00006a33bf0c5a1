"""SpQR's kernels for CUDA GPUs: decoding, and the product of dense part and outliers for up to sixteen vectors at once.

A warp reads two tiles that lie beside each other, 256 bytes at once: lane r takes row r of the first, lane 16 + r that
of the second. Three exchanges within the warp gather the tile's statistics from its rows' bytes (thesis, section 3.1).
They end as two pairs of fp16 numbers: the scales of scales and of zero points, and their zero points. The codes of a
row's scale and zero point are the first of nine pairs in its word, so the same instructions find both. The other eight
pairs are weights.

Codes become fp16 numbers in one of two ways, which section 3.2 of the thesis compares:

    cuda_table       a table of all 64 pairs of codes in shared memory, one copy for each lane: no conflicts of banks
    cuda_arithmetic  the bits of 1024 + code are put together, and 1024 is subtracted

Then s · (q − z) takes two instructions for two weights, both rounded to fp16 as the format asks: products are exactly
those of the weights that `decode` gives, summed in fp32.

Activations go to shared memory in fp32, some columns at a time, for all warps of the thread block. These take several
tile rows, or share one where the matrix is too small to keep the GPU busy. Each lane goes on along its outliers until
their columns, which rise within a row, lie beyond those in shared memory. Sums are added up over lanes and warps in a
fixed order, so that the result depends on the shape and the GPU, not on the run.

No contents of words and outliers make a kernel read or write outside of its tensors.
"""

from functools import cache
from weakref import WeakKeyDictionary

import torch
from numba import cuda, float32, int32, int64, uint16, uint32, uint64
from torch import Tensor

from toolkit.kernels.csr.cuda import VECTORS, lane_words, readable, value
from toolkit.kernels.csr.layout import Outliers, column_bits
from toolkit.kernels.csr.shared import column
from toolkit.kernels.engine.elements import float32_bits, float32_from_float32
from toolkit.kernels.engine.gpu import (
    FROM_FLOAT32,
    LANES,
    TO_FLOAT32,
    Launch,
    as_array,
    as_unsigned,
    exchange,
    multiply_pairs,
    multiprocessors,
    run,
    subtract_pairs,
)
from toolkit.kernels.spqr.shared import LEVELS, SECOND_ORDER, TILE

TILES = LANES // TILE  # that a warp reads at once
WARPS = 8  # of a thread block, at most
BUSY_WARPS = 24  # that keep a multiprocessor busy
PAIRS = TILE // 2  # of weights in a word, behind the pair of the scale's and the zero point's codes
PAIR_BITS, CODE_PAIRS = 6, LEVELS * LEVELS
TABLE = CODE_PAIRS * LANES  # entries
FLOATS_AT_ONCE = 4096  # activations in shared memory, of all vectors together
TILES_DECODED = 32  # of a tile row, kept in shared memory before they are written
BUSY_BLOCKS = 4  # of the decoder, that keep a multiprocessor busy
K1024 = 0x6400  # as fp16; the bits below are units

_STORED = WeakKeyDictionary()
_from_float16 = TO_FLOAT32[torch.float16]


def decode(words: Tensor, outliers: Outliers, out: Tensor, by_table: bool) -> None:
    """Fill `out` [rows, columns], of a floating-point type. The caller has checked the arguments."""
    rows, columns = outliers.shape
    if out.numel() == 0:
        return
    dense = out if out.dtype in FROM_FLOAT32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    launch = decode_launch(rows, columns, multiprocessors(out.device))
    kernel = decode_kernel(by_table, outliers.name, column_bits(columns), dense.dtype)
    run(kernel, launch, out.device, *_stored(words, outliers), as_unsigned(dense))
    if dense is not out:
        out.copy_(dense)


def matvec(words: Tensor, outliers: Outliers, x: Tensor, out: Tensor, by_table: bool) -> None:
    """Fill `out` [batch, rows] with products with `x` [batch, columns]. The caller has checked the arguments."""
    rows, columns = outliers.shape
    if out.numel() == 0 or columns == 0:
        out.zero_()
        return
    x, launch = readable(x), matvec_launch(rows, columns, multiprocessors(out.device))
    for some, result in zip(x.split(VECTORS), out.split(VECTORS), strict=True):
        kernel = matvec_kernel(by_table, outliers.name, column_bits(columns), x.dtype, len(some))
        run(kernel, launch, out.device, *_stored(words, outliers), as_unsigned(some), result)


def decode_launch(rows: int, columns: int, multiprocessors: int) -> Launch:
    """A thread block for each tile row, or several along y where one would leave the GPU idle."""
    tall, parts = -(-rows // TILE), -(-columns // (TILE * TILES_DECODED))
    along = min(parts, max(1, -(-BUSY_BLOCKS * multiprocessors // tall)))
    return Launch((tall, along), (LANES, min(WARPS, _turns(columns)), 1))


def matvec_launch(rows: int, columns: int, multiprocessors: int) -> Launch:
    """A warp for each tile row, or several warps (along y) where one would leave the GPU idle: a power of two."""
    tall, split = -(-rows // TILE), 1
    while 2 * split <= min(_turns(columns), WARPS) and tall * split < BUSY_WARPS * multiprocessors:
        split *= 2
    side_by_side = min(WARPS // split, tall)
    return Launch((-(-tall // side_by_side), 1), (LANES, split, side_by_side))


def tiles_at_once(batch: int) -> int:
    """The tiles whose activations are in shared memory: as many as fit, and whole turns of all warps."""
    return FLOATS_AT_ONCE // (TILE * batch) // (TILES * WARPS) * (TILES * WARPS)


def _turns(columns: int) -> int:
    """How often a single warp would read for a tile row."""
    return -(-columns // (TILE * TILES))


def _stored(words: Tensor, outliers: Outliers) -> tuple:
    """The tensors as arrays, kept with the outliers: wrapping takes longer than some kernels."""
    known = _STORED.get(outliers)
    if known is None or known[0] is not words:
        tensors = as_unsigned(words), outliers.offsets, as_unsigned(outliers.col_vals)
        known = _STORED[outliers] = (words, tuple(map(as_array, tensors)))
    return known[1]


@cuda.jit(device=True, inline="always")
def as_number(codes):
    """Two codes, the first in the lowest bits, as two fp16 numbers."""
    bits = codes & uint32(7) | (codes & uint32(56)) << uint32(13) | uint32(K1024 | K1024 << 16)
    return subtract_pairs(uint32(bits), uint32(K1024 | K1024 << 16))


@cuda.jit(device=True, inline="always")
def tabulate(table):
    """Set `table[32 · codes + lane]` to `as_number(codes)`. The thread block must wait before it reads."""
    warp = cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y
    for codes in range(warp, CODE_PAIRS, cuda.blockDim.y * cuda.blockDim.z):
        table[uint32(LANES * codes + cuda.threadIdx.x)] = as_number(uint32(codes))


@cuda.jit(device=True, inline="always")
def word_of(words, tall, tile, end):
    """The lane's word of a tile; 0, which stands for weights of 0, for tiles from `end` on and beyond the last row."""
    if tall < words.shape[0] and tile < end:
        return words[tall, tile, cuda.threadIdx.x % TILE]
    return uint64(0)


@cuda.jit(device=True, inline="always")
def statistics(word):
    """The tile's scales, and its zero points, for (scale, zero point): the first number in the low half."""
    row = uint32(cuda.threadIdx.x % TILE)
    byte = uint32(word >> uint64(SECOND_ORDER)) & uint32(255)
    part = uint32(byte << (uint32(8) * (row >> uint32(1) & uint32(3))))
    part = uint32(part | uint32(exchange(int32(part), 2)))
    part = uint32(part | uint32(exchange(int32(part), 4)))
    other = uint32(exchange(int32(part), 8))
    if row < uint32(8):
        return part, other
    return other, part


@cuda.jit(device=True, inline="always")
def dequantise_pairs(numbers, scales, zeros):
    """scale · (number − zero) for two numbers, every step rounded to fp16, as `shared.dequantise` does for one."""
    return multiply_pairs(scales, subtract_pairs(numbers, zeros))


@cuda.jit(device=True, inline="always")
def twice_low(pair):
    """The low half in both."""
    return uint32((pair & uint32(0xFFFF)) | pair << uint32(16))


@cuda.jit(device=True, inline="always")
def twice_high(pair):
    """The high half in both."""
    return uint32((pair & uint32(0xFFFF0000)) | pair >> uint32(16))


@cuda.jit(device=True, inline="always")
def low(pair):
    """The low half as fp32."""
    return _from_float16(uint16(pair & uint32(0xFFFF)))


@cuda.jit(device=True, inline="always")
def high(pair):
    """The high half as fp32."""
    return _from_float16(uint16(pair >> uint32(16)))


@cache
def numbers(by_table: bool):
    """The function that gives a pair of the word's codes, the one with this number, as fp16 numbers."""

    @cuda.jit(device=True, inline="always")
    def numbers(word, pair, table):
        codes = uint32(word >> uint64(PAIR_BITS * pair)) & uint32(CODE_PAIRS - 1)
        if by_table:
            return table[uint32(codes * uint32(LANES) | uint32(cuda.threadIdx.x))]
        return as_number(codes)

    return numbers


@cuda.jit(device=True, inline="always")
def steps(first, end):
    """How many turns the warps along y need for these tiles: the same for all, since they wait for each other."""
    at_once = TILES * cuda.blockDim.y
    return (end - first + at_once - 1) // at_once


@cache
def stage(x_dtype: torch.dtype):
    """The function that puts the activations of some tiles into shared memory, as pairs of fp32, with zeros behind."""
    to_float32 = TO_FLOAT32[x_dtype]

    @cuda.jit(device=True, inline="always")
    def stage(x, first, tiles, activations):
        threads = cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z
        warp = cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y
        for b in range(x.shape[0]):
            for pair in range(warp * LANES + cuda.threadIdx.x, tiles * PAIRS, threads):
                column = TILE * first + 2 * pair
                both = uint64(0)
                if column < x.shape[1]:
                    both = uint64(float32_bits(to_float32(x[b, column])))
                if column + 1 < x.shape[1]:
                    both |= uint64(float32_bits(to_float32(x[b, column + 1]))) << uint64(32)
                activations[b, pair] = both

    return stage


@cuda.jit(device=True, inline="always")
def first_float(both):
    """The number in the low half of 64 bits."""
    return float32_from_float32(uint32(both & uint64(0xFFFFFFFF)))


@cuda.jit(device=True, inline="always")
def second_float(both):
    """The number in the high half of 64 bits."""
    return float32_from_float32(uint32(both >> uint64(32)))


@cuda.jit(device=True, inline="always")
def add_up(total, batch, sums, tall, y):
    """Sum over the two lanes of a row, then over the warps that share a tile row, in their order; set `y`."""
    warp = cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y
    for b in range(batch):
        whole = total[b] + exchange(total[b], TILE)
        if cuda.threadIdx.x < TILE:
            sums[warp, b, cuda.threadIdx.x] = whole
    cuda.syncthreads()
    if cuda.threadIdx.y == 0:
        for result in range(cuda.threadIdx.x, TILE * batch, LANES):
            whole = float32(0)
            for other in range(cuda.blockDim.y):
                whole += sums[warp + other, result // TILE, result % TILE]
            row = tall * TILE + result % TILE
            if row < y.shape[1]:
                y[result // TILE, row] = whole


@cache
def matvec_kernel(by_table: bool, storage: str, bits: int, x_dtype: torch.dtype, batch: int):
    """The kernel that sets `y[vector, row] = Σ w[row, column] · x[vector, column]`, outliers included."""
    number_pairs, put, words_of_lane = numbers(by_table), stage(x_dtype), lane_words(storage)
    at_once, lanes_of_row = tiles_at_once(batch), LANES // TILE
    pairs, entries = at_once * PAIRS, TABLE if by_table else 1

    @cuda.jit
    def multiply_spqr(words, offsets, col_vals, x, y):
        table = cuda.shared.array(entries, uint32)
        activations = cuda.shared.array((batch, pairs), uint64)
        sums = cuda.shared.array((WARPS, batch, TILE), float32)
        total = cuda.local.array(batch, float32)
        for b in range(batch):
            total[b] = float32(0)
        if by_table:
            tabulate(table)
        tall = cuda.blockIdx.x * cuda.blockDim.z + cuda.threadIdx.z
        half, split = cuda.threadIdx.x // TILE, cuda.blockDim.y
        part, parts = half + lanes_of_row * cuda.threadIdx.y, lanes_of_row * split
        row, rows, count = cuda.threadIdx.x % TILE, y.shape[1], col_vals.size
        at, end, step = words_of_lane(offsets, count, tall, row, rows, part, parts)
        for first in range(0, words.shape[1], at_once):
            last = min(words.shape[1], first + at_once)
            turns = steps(first, last)
            cuda.syncthreads()
            put(x, first, turns * TILES * split, activations)
            cuda.syncthreads()
            tile = first + TILES * cuda.threadIdx.y + half
            word = word_of(words, tall, tile, last)
            for _ in range(turns):
                following = word_of(words, tall, tile + TILES * split, last)  # on its way while this one is used
                scales, zeros = statistics(word)
                both = dequantise_pairs(number_pairs(word, 0, table), scales, zeros)
                scales, zeros = twice_low(both), twice_high(both)
                place = uint32((tile - first) * PAIRS)
                for pair in range(PAIRS):
                    weights = dequantise_pairs(number_pairs(word, pair + 1, table), scales, zeros)
                    for b in range(batch):
                        given = activations[b, place + uint32(pair)]
                        total[b] += low(weights) * first_float(given)
                        total[b] += high(weights) * second_float(given)
                word = following
                tile += TILES * split
            while at < end:
                outlier = col_vals[at]
                place = column(outlier, bits) - int64(TILE * first)
                if place >= TILE * at_once:
                    break
                if place >= 0:
                    for b in range(batch):
                        given = activations[b, place // 2]
                        total[b] += value(outlier, bits) * (second_float(given) if place % 2 else first_float(given))
                at += step
        add_up(total, batch, sums, tall, y)

    return multiply_spqr


@cache
def decode_kernel(by_table: bool, storage: str, bits: int, dtype: torch.dtype):
    """The kernel that fills `dense`, as bits: the weights with their outliers, added in fp32 and rounded once."""
    number_pairs, words_of_lane, from_float32 = numbers(by_table), lane_words(storage), FROM_FLOAT32[dtype]
    entries, lanes_of_row, width = TABLE if by_table else 1, LANES // TILE, TILE * TILES_DECODED
    pitch = width + 1  # so that the sixteen rows of a tile lie in different banks

    @cuda.jit
    def decode_spqr(words, offsets, col_vals, dense):
        table = cuda.shared.array(entries, uint32)
        decoded = cuda.shared.array((TILE, pitch), float32)
        if by_table:
            tabulate(table)
            cuda.syncthreads()
        tall, split = cuda.blockIdx.x, cuda.blockDim.y
        half, row = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
        part, parts = half + lanes_of_row * cuda.threadIdx.y, lanes_of_row * split
        rows, columns, count = dense.shape[0], dense.shape[1], col_vals.size
        at, end, step = words_of_lane(offsets, count, tall, row, rows, part, parts)
        for first in range(TILES_DECODED * cuda.blockIdx.y, words.shape[1], TILES_DECODED * cuda.gridDim.y):
            last = min(words.shape[1], first + TILES_DECODED)
            tile = first + TILES * cuda.threadIdx.y + half
            for _ in range(steps(first, last)):
                word = word_of(words, tall, tile, last)
                scales, zeros = statistics(word)
                both = dequantise_pairs(number_pairs(word, 0, table), scales, zeros)
                scales, zeros = twice_low(both), twice_high(both)
                if tile < last:
                    for pair in range(PAIRS):
                        weights = dequantise_pairs(number_pairs(word, pair + 1, table), scales, zeros)
                        decoded[row, TILE * (tile - first) + 2 * pair] = low(weights)
                        decoded[row, TILE * (tile - first) + 2 * pair + 1] = high(weights)
                tile += TILES * split
            cuda.syncthreads()
            while at < end:
                outlier = col_vals[at]
                place = column(outlier, bits) - int64(TILE * first)
                if place >= width:
                    break
                if place >= 0 and outlier != 0:  # padding is no outlier, and its lane is not alone at its place
                    decoded[row, place] += value(outlier, bits)
                at += step
            cuda.syncthreads()
            for line in range(cuda.threadIdx.y, min(TILE, rows - TILE * tall), split):
                for place in range(cuda.threadIdx.x, min(width, columns - TILE * first), LANES):
                    dense[TILE * tall + line, TILE * first + place] = from_float32(decoded[line, place])
            cuda.syncthreads()

    return decode_spqr
