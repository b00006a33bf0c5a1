"""The FFN of some neurons on CUDA GPUs, in two kernels, for dense bundles and for records of quantised neurons.

The first gives each neuron to a warp, which multiplies its gate row and its up row with all vectors and keeps the
neuron's values; those within the threshold become 0. The second gives each lane a few columns, and each thread block a
part of the neurons: it adds their down columns times their values. Down columns of neurons whose values are all 0 are
not read. The sums of the parts are added in their order, so that the result depends on the shape and the GPU, not on
the run.

Lanes read a word at once. It is eight bytes of a dense bundle where rows begin at such an address, else an element. In
records it is 32 bits of codes: two numbers of 4-bit codes or four of 2-bit codes, four codes each. Scales and zero
points of a group are read beside them, and stay in the caches for the lanes of the same group.
"""

from functools import cache

import torch
from numba import cuda, float32, int64, uint8, uint16, uint32, uint64
from torch import Tensor

from toolkit.kernels.engine.activations import ACTIVATIONS
from toolkit.kernels.engine.gpu import LANES, TO_FLOAT32, WARPS, Launch, as_unsigned, multiprocessors, run, sum_all
from toolkit.kernels.neurons.records import BLOCK, FIELDS, HEAD_BYTES, codes_start, groups, section_bytes

# vectors that one pass over the neurons multiplies, at most: a lane has a sum for each, and for each weight of a word
VECTORS, VECTORS_OF_RECORDS = 16, 4
LANE_BYTES, WORD_BYTES = 8, 4  # that a lane reads at once of dense bundles, and of records
BUSY_WARPS = 24  # that keep a multiprocessor busy
ROWS_OF_WARP = 4  # neurons of a part for each of its warps, at least: a part costs a sum a column
ELEMENT = {1: uint8, 2: uint16, 4: uint32}  # by width in bytes


def ffn(
    bundles: Tensor,
    bias: Tensor | None,
    x: Tensor,
    activation: str,
    threshold: float,
    bits: int | None,
    wanted: Tensor | None,
    out: Tensor,
) -> None:
    """Fill `out` [vectors, hidden] for `x` [vectors, hidden] and `bias`, all fp32. The caller has checked them."""
    rows, hidden, device = len(bundles), x.shape[1], out.device
    if rows == 0 or out.numel() == 0:
        out.zero_()
        return
    if bits is None:
        gated, at_once = bundles.shape[1] == 3 * hidden, elements_at_once(bundles, hidden)
        words = bundles.view(torch.uint64) if at_once > 1 else as_unsigned(bundles)
        kind, sizes, of_column = (bundles.dtype, at_once), (hidden // at_once, 0, 0), hidden // at_once
    else:
        gated, words, kind, of_column = True, bundles.view(torch.uint32), bits, hidden * bits // 32
        sizes = section_bytes(hidden, bits) // WORD_BYTES, codes_start(hidden, bits) // WORD_BYTES, groups(hidden, bits)
    shifts = torch.zeros(rows, device=device) if bias is None else bias
    launches = values_launch(rows), columns_launch(rows, of_column, multiprocessors(device))
    most = VECTORS if bits is None else VECTORS_OF_RECORDS
    every = torch.empty(0, 0, dtype=torch.uint8, device=device)
    for first in range(0, len(x), most):
        some, result = x[first : first + most], out[first : first + most]
        counted = every if wanted is None else wanted[first : first + most].view(torch.uint8)
        values = torch.empty(len(some), rows, device=device)
        find, add = values_kernel(kind, activation, gated, len(some)), columns_kernel(kind, gated, len(some))
        run(find, launches[0], device, words, *sizes, of_column, shifts, counted, some, threshold, values)
        partials = torch.empty(launches[1].grid[1], *result.shape, device=device)
        run(add, launches[1], device, words, *sizes, of_column, values, partials)
        torch.sum(partials, 0, out=result)


def elements_at_once(bundles: Tensor, hidden: int) -> int:
    """How many elements a lane reads at once: as many as fill `LANE_BYTES`, or one where these are not aligned."""
    at_once = LANE_BYTES // bundles.itemsize
    return at_once if hidden % at_once == 0 and bundles.data_ptr() % LANE_BYTES == 0 else 1


def values_launch(rows: int) -> Launch:
    """A warp for each neuron."""
    warps = min(WARPS, rows)
    return Launch((-(-rows // warps), 1), (LANES, warps, 1))


def columns_launch(rows: int, words: int, multiprocessors: int) -> Launch:
    """A lane for each word of a down column along x, and along y as many parts of the neurons as keep the GPU busy."""
    chunks, warps = -(-words // LANES), min(WARPS, rows)
    parts = min(-(-BUSY_WARPS * multiprocessors // (chunks * warps)), rows // (ROWS_OF_WARP * warps))
    return Launch((chunks, max(1, parts)), (LANES, warps, 1))


@cache
def dense_reader(dtype: torch.dtype, at_once: int):
    """Device functions: one of the weights of a word, as fp32, and its column; and how many weights a word has."""
    to_float32, element, bits = TO_FLOAT32[dtype], ELEMENT[dtype.itemsize], 8 * dtype.itemsize
    mask = (1 << bits) - 1

    @cuda.jit(device=True, inline="always")
    def weight(words, row, start, codes, count, place, index):
        word = words[row, uint32(start + place)]
        if at_once == 1:
            return to_float32(element(word))
        return to_float32(element(word >> uint64(bits * index) & uint64(mask)))

    @cuda.jit(device=True, inline="always")
    def column(place, index):
        return uint32(place * at_once + index)

    return weight, column, at_once


@cache
def record_reader(bits: int):
    """The same for codes of so many bits: `codes` words lie before a section's codes, and it has `count` groups."""
    half, numbers = TO_FLOAT32[torch.float16], 8 // bits  # 16-bit numbers of four 4-bit codes, or bytes of 2-bit ones
    words_of_block = BLOCK * bits // 32

    @cuda.jit(device=True, inline="always")
    def scaled(words, row, start, number, at):
        """Step · byte + offset: the scale (number 0) or zero point (1) whose byte is the section's byte `at`."""
        head, word = words[row, uint32(start + number)], words[row, uint32(start + at // WORD_BYTES)]
        byte = float32(word >> uint32(8 * (at % WORD_BYTES)) & uint32(255))
        return half(uint16(head & uint32(0xFFFF))) * byte + half(uint16(head >> uint32(16)))

    @cuda.jit(device=True, inline="always")
    def weight(words, row, start, codes, count, place, index):
        field, block = index // numbers, place // words_of_block
        at = HEAD_BYTES + (block if bits == 4 else FIELDS * block + field)
        word = words[row, uint32(start + codes + place)]
        shift = bits * (FIELDS * (index % numbers) + field)
        code = float32(word >> uint32(shift) & uint32((1 << bits) - 1))
        return scaled(words, row, start, 0, at) * (code - scaled(words, row, start, 1, at + count))

    @cuda.jit(device=True, inline="always")
    def column(place, index):
        lane = place % words_of_block * numbers + index % numbers
        return uint32(place // words_of_block * BLOCK + 16 * (index // numbers) + lane)

    return weight, column, FIELDS * numbers


def reader(kind: tuple[torch.dtype, int] | int):
    """The device functions for dense elements, so many in a word, or for codes of so many bits."""
    return record_reader(kind) if isinstance(kind, int) else dense_reader(*kind)


@cache
def values_kernel(kind, activation: str, gated: bool, batch: int):
    """The kernel that sets `values[vector, row]`: act(gate · x) · (up · x), or act(up · x + bias[row]); else 0.

    A section of a row has `section` words, of which `places` are read by the lanes in turn. Where `wanted[vector, row]`
    is 0 a vector's value is 0; rows that no vector wants are not read. Without any `wanted` all count.
    """
    (weight, column, of_word), activate = reader(kind), ACTIVATIONS[activation]

    @cuda.jit(device=True, inline="always")
    def multiply(words, row, start, codes, count, place, x, total):
        for index in range(of_word):
            factor, at = weight(words, row, start, codes, count, place, index), column(place, index)
            for b in range(batch):
                total[b] += factor * x[b, at]

    @cuda.jit
    def find_values(words, section, codes, count, places, bias, wanted, x, threshold, values):
        first, second = cuda.local.array(batch, float32), cuda.local.array(batch, float32)
        for b in range(batch):
            first[b], second[b] = float32(0), float32(0)
        row = uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.y) + uint64(cuda.threadIdx.y)
        inside, every = row < words.shape[0], wanted.shape[0] == 0
        read = inside and every
        for b in range(0 if every or not inside else batch):
            read = read or wanted[b, row] != 0
        for place in range(cuda.threadIdx.x, places if read else 0, LANES):
            multiply(words, row, 0, codes, count, place, x, first)
            if gated:
                multiply(words, row, section, codes, count, place, x, second)
        for b in range(batch):
            gate, up = sum_all(first[b]), float32(1)
            if gated:
                up = sum_all(second[b])
            if inside and cuda.threadIdx.x == 0:
                value = activate(float32(gate + bias[row])) * up
                counts = not abs(value) <= threshold  # a NaN counts
                values[b, row] = value if counts and (every or wanted[b, row] != 0) else float32(0)

    return find_values


@cache
def columns_kernel(kind, gated: bool, batch: int):
    """The kernel that sets `partials[part, vector]` [hidden] to the sum of a part's down columns times their values."""
    (weight, column, of_word), before = reader(kind), 2 if gated else 1
    results = batch * of_word

    @cuda.jit
    def add_columns(words, section, codes, count, places, values, partials):
        sums = cuda.shared.array((WARPS, results, LANES), float32)
        total, factor = cuda.local.array((batch, of_word), float32), cuda.local.array(batch, float32)
        for b in range(batch):
            for index in range(of_word):
                total[b, index] = float32(0)
        rows, parts, part = int64(words.shape[0]), int64(cuda.gridDim.y), int64(cuda.blockIdx.y)
        place = cuda.blockIdx.x * LANES + cuda.threadIdx.x
        end = rows * (part + 1) // parts if place < places else 0
        for row in range(rows * part // parts + cuda.threadIdx.y, end, cuda.blockDim.y):
            counts = False
            for b in range(batch):
                factor[b] = values[b, uint64(row)]
                counts = counts or factor[b] != 0
            if counts:
                for index in range(of_word):
                    value = weight(words, uint64(row), before * section, codes, count, place, index)
                    for b in range(batch):
                        total[b, index] += value * factor[b]
        for b in range(batch):
            for index in range(of_word):
                sums[cuda.threadIdx.y, b * of_word + index, cuda.threadIdx.x] = total[b, index]
        cuda.syncthreads()
        if cuda.threadIdx.y == 0 and place < places:
            for result in range(results):
                whole = float32(0)
                for warp in range(cuda.blockDim.y):
                    whole += sums[warp, result, cuda.threadIdx.x]
                partials[part, result // of_word, column(place, result % of_word)] = whole

    return add_columns
