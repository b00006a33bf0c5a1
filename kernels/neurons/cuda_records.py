"""The FFN of quantised neurons on CUDA GPUs, in two kernels as `cuda` has them.

A lane reads 32 bits of codes at once: two numbers of 4-bit codes or four of 2-bit codes, four codes each. Scales and
zero points of a group are read beside them, and stay in the caches for the lanes of the same group.
"""

from functools import cache

import torch
from numba import cuda, float32, int64, uint16, uint32, uint64
from torch import Tensor

from toolkit.kernels.common.gpu import TO_FLOAT32, multiprocessors, run, sum_all
from toolkit.kernels.neurons.cuda import columns_launch, values_launch
from toolkit.kernels.neurons.records import BLOCK, FIELDS, HEAD_BYTES, codes_start, groups, section_bytes
from toolkit.kernels.neurons.shared import ACTIVATIONS
from toolkit.kernels.runtime.launch import LANES, WARPS

VECTORS = 4  # that one pass over the neurons multiplies, at most: a lane sums as many codes as a word has, for each
WORD_BYTES = 4


def ffn(records: Tensor, x: Tensor, activation: str, threshold: float, bits: int, out: Tensor) -> None:
    """Fill `out` [vectors, hidden] for `x` [vectors, hidden], all fp32. The caller has checked them."""
    rows, hidden, device = len(records), x.shape[1], out.device
    if rows == 0 or out.numel() == 0:
        out.zero_()
        return
    words = records.view(torch.uint32)
    sizes = section_bytes(hidden, bits) // WORD_BYTES, codes_start(hidden, bits) // WORD_BYTES, groups(hidden, bits)
    launches = values_launch(rows), columns_launch(rows, hidden * bits // 32, multiprocessors(device))
    for first in range(0, len(x), VECTORS):
        some, result = x[first : first + VECTORS], out[first : first + VECTORS]
        values = torch.empty(len(some), rows, device=device)
        run(values_kernel(bits, activation, len(some)), launches[0], device, words, *sizes, some, threshold, values)
        partials = torch.empty(launches[1].grid[1], *result.shape, device=device)
        run(columns_kernel(bits, len(some)), launches[1], device, words, *sizes, values, partials)
        torch.sum(partials, 0, out=result)


@cache
def readers(bits: int):
    """Device functions: a group's factor or addend, and the column of a code in a word."""
    half, numbers = TO_FLOAT32[torch.float16], 8 // bits  # 16-bit numbers of four 4-bit codes, or bytes of 2-bit ones
    words_of_block = BLOCK * bits // 32

    @cuda.jit(device=True, inline="always")
    def byte(words, row, start, at):
        word = words[row, uint32(start + at // WORD_BYTES)]
        return float32(word >> uint32(8 * (at % WORD_BYTES)) & uint32(255))

    @cuda.jit(device=True, inline="always")
    def scaled(words, row, start, number, at):
        """Step · byte + offset: the scale (number 0) or zero point (1) whose byte is the section's byte `at`."""
        head = words[row, uint32(start + number)]
        return half(uint16(head & uint32(0xFFFF))) * byte(words, row, start, at) + half(uint16(head >> uint32(16)))

    @cuda.jit(device=True, inline="always")
    def group(place, field):
        block = place // words_of_block
        return block if bits == 4 else FIELDS * block + field

    @cuda.jit(device=True, inline="always")
    def column(place, number, field):
        lane = place % words_of_block * numbers + number
        return place // words_of_block * BLOCK + 16 * field + lane

    @cuda.jit(device=True, inline="always")
    def code(word, number, field):
        return float32(word >> uint32(bits * (FIELDS * number + field)) & uint32((1 << bits) - 1))

    return scaled, group, column, code, numbers


@cache
def values_kernel(bits: int, activation: str, batch: int):
    """The kernel that sets `values[vector, row]` to act(gate · x) · (up · x), or 0 within the threshold."""
    scaled, group, column, code, numbers = readers(bits)
    activate = ACTIVATIONS[activation]

    @cuda.jit
    def find_values(words, section, codes, count, x, threshold, values):
        total = cuda.local.array((2, batch), float32)
        for part in range(2):
            for b in range(batch):
                total[part, b] = float32(0)
        row = uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.y) + uint64(cuda.threadIdx.y)
        inside, places = row < words.shape[0], x.shape[1] * bits // 32
        for place in range(cuda.threadIdx.x, places if inside else 0, LANES):
            for part in range(2):
                start = part * section
                word = words[row, uint32(start + codes + place)]
                for field in range(FIELDS):
                    at = HEAD_BYTES + group(place, field)
                    scale, zero = scaled(words, row, start, 0, at), scaled(words, row, start, 1, at + count)
                    for number in range(numbers):
                        weight = scale * (code(word, number, field) - zero)
                        for b in range(batch):
                            total[part, b] += weight * x[b, uint32(column(place, number, field))]
        for b in range(batch):
            first, second = sum_all(total[0, b]), sum_all(total[1, b])
            if inside and cuda.threadIdx.x == 0:
                value = activate(first) * second
                values[b, row] = float32(0) if abs(value) <= threshold else value  # a NaN counts

    return find_values


@cache
def columns_kernel(bits: int, batch: int):
    """The kernel that sets `partials[part, vector]` [hidden] to the sum of a part's down columns times their values."""
    scaled, group, column, code, numbers = readers(bits)
    of_word = FIELDS * numbers
    results = batch * of_word

    @cuda.jit
    def add_columns(words, section, codes, count, values, partials):
        sums = cuda.shared.array((WARPS, results, LANES), float32)
        total, factor = cuda.local.array((batch, of_word), float32), cuda.local.array(batch, float32)
        for b in range(batch):
            for index in range(of_word):
                total[b, index] = float32(0)
        rows, parts, part = int64(words.shape[0]), int64(cuda.gridDim.y), int64(cuda.blockIdx.y)
        place, start = cuda.blockIdx.x * LANES + cuda.threadIdx.x, 2 * section
        within = place < partials.shape[2] * bits // 32
        end = rows * (part + 1) // parts if within else 0
        for row in range(rows * part // parts + cuda.threadIdx.y, end, cuda.blockDim.y):
            counts = False
            for b in range(batch):
                factor[b] = values[b, uint64(row)]
                counts = counts or factor[b] != 0
            if counts:
                word = words[uint64(row), uint32(start + codes + place)]
                for field in range(FIELDS):
                    at = HEAD_BYTES + group(place, field)
                    scale = scaled(words, uint64(row), start, 0, at)
                    zero = scaled(words, uint64(row), start, 1, at + count)
                    for number in range(numbers):
                        weight = scale * (code(word, number, field) - zero)
                        for b in range(batch):
                            total[b, field * numbers + number] += weight * factor[b]
        for b in range(batch):
            for index in range(of_word):
                sums[cuda.threadIdx.y, b * of_word + index, cuda.threadIdx.x] = total[b, index]
        cuda.syncthreads()
        if cuda.threadIdx.y == 0 and within:
            for result in range(results):
                whole = float32(0)
                for warp in range(cuda.blockDim.y):
                    whole += sums[warp, result, cuda.threadIdx.x]
                index = result % of_word
                partials[part, result // of_word, uint32(column(place, index % numbers, index // numbers))] = whole

    return add_columns
