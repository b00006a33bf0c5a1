"""The FFN of some neurons on CUDA GPUs, in two kernels.

The first gives each neuron to a warp, which multiplies its gate row and its up row with all vectors and keeps the
neuron's values; those within the threshold become 0. The second gives each lane a few columns, and each thread block a
part of the neurons: it adds their down columns times their values. Down columns of neurons whose values are all 0 are
not read. The sums of the parts are added in their order, so that the result depends on the shape and the GPU, not on
the run. Lanes read eight bytes at once where rows begin at such an address, else an element.
"""

from functools import cache

import torch
from numba import cuda, float32, int64, uint8, uint16, uint32, uint64
from torch import Tensor

from toolkit.kernels.common.gpu import TO_FLOAT32, as_unsigned, multiprocessors, run, sum_all
from toolkit.kernels.neurons.shared import ACTIVATIONS
from toolkit.kernels.runtime.launch import LANES, WARPS, Launch

VECTORS = 16  # that one pass over the neurons multiplies, at most
LANE_BYTES = 8  # that a lane reads at once
BUSY_WARPS = 24  # that keep a multiprocessor busy
ROWS_OF_WARP = 4  # neurons of a part for each of its warps, at least: a part costs a sum a column
ELEMENT = {1: uint8, 2: uint16, 4: uint32}  # by width in bytes


def ffn(bundles: Tensor, bias: Tensor | None, x: Tensor, activation: str, threshold: float, out: Tensor) -> None:
    """Fill `out` [vectors, hidden] for `x` [vectors, hidden] and `bias`, all fp32. The caller has checked them."""
    rows, hidden = len(bundles), x.shape[1]
    if rows == 0 or out.numel() == 0:
        out.zero_()
        return
    gated, device = bundles.shape[1] == 3 * hidden, out.device
    at_once = elements_at_once(bundles, hidden)
    words = bundles.view(torch.uint64) if at_once > 1 else as_unsigned(bundles)
    shifts = torch.zeros(rows, device=device) if bias is None else bias
    launches = values_launch(rows), columns_launch(rows, hidden // at_once, multiprocessors(device))
    for first in range(0, len(x), VECTORS):
        some, result = x[first : first + VECTORS], out[first : first + VECTORS]
        values = torch.empty(len(some), rows, device=device)
        find = values_kernel(bundles.dtype, at_once, activation, gated, len(some))
        run(find, launches[0], device, words, shifts, some, threshold, values)
        partials = torch.empty(launches[1].grid[1], *result.shape, device=device)
        run(columns_kernel(bundles.dtype, at_once, len(some)), launches[1], device, words, values, partials)
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
def weight_of(dtype: torch.dtype, at_once: int):
    """The function that gives one of the weights in a word as fp32."""
    to_float32, element, bits = TO_FLOAT32[dtype], ELEMENT[dtype.itemsize], 8 * dtype.itemsize
    mask = (1 << bits) - 1

    @cuda.jit(device=True, inline="always")
    def weight_of(word, index):
        if at_once == 1:
            return to_float32(element(word))
        return to_float32(element(word >> uint64(bits * index) & uint64(mask)))

    return weight_of


@cache
def values_kernel(dtype: torch.dtype, at_once: int, activation: str, gated: bool, batch: int):
    """The kernel that sets `values[vector, row]`: act(gate · x) · (up · x), or act(up · x + bias[row]); else 0."""
    weight, activate, parts = weight_of(dtype, at_once), ACTIVATIONS[activation], 2 if gated else 1

    @cuda.jit
    def find_values(bundles, bias, x, threshold, values):
        total = cuda.local.array((parts, batch), float32)
        for part in range(parts):
            for b in range(batch):
                total[part, b] = float32(0)
        row = uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.y) + uint64(cuda.threadIdx.y)
        inside, words = row < bundles.shape[0], uint32(x.shape[1] // at_once)
        for place in range(cuda.threadIdx.x, words if inside else 0, LANES):
            for part in range(parts):
                word = bundles[row, uint32(part * words + place)]
                for index in range(at_once):
                    factor = weight(word, index)
                    for b in range(batch):
                        total[part, b] += factor * x[b, uint32(place * at_once + index)]
        for b in range(batch):
            first, second = sum_all(total[0, b]), float32(1)
            if gated:
                second = sum_all(total[1, b])
            if inside and cuda.threadIdx.x == 0:
                value = activate(float32(first + bias[row])) * second
                values[b, row] = float32(0) if abs(value) <= threshold else value  # a NaN counts

    return find_values


@cache
def columns_kernel(dtype: torch.dtype, at_once: int, batch: int):
    """The kernel that sets `partials[part, vector]` [hidden] to the sum of a part's down columns times their values."""
    weight, results = weight_of(dtype, at_once), batch * at_once

    @cuda.jit
    def add_columns(bundles, values, partials):
        sums = cuda.shared.array((WARPS, results, LANES), float32)
        total, factor = cuda.local.array((batch, at_once), float32), cuda.local.array(batch, float32)
        for b in range(batch):
            for index in range(at_once):
                total[b, index] = float32(0)
        rows, parts, part = int64(bundles.shape[0]), int64(cuda.gridDim.y), int64(cuda.blockIdx.y)
        words = uint32(partials.shape[2] // at_once)
        place = uint32(cuda.blockIdx.x * LANES + cuda.threadIdx.x)
        end = rows * (part + 1) // parts if place < words else 0
        for row in range(rows * part // parts + cuda.threadIdx.y, end, cuda.blockDim.y):
            counts = False
            for b in range(batch):
                factor[b] = values[b, uint64(row)]
                counts = counts or factor[b] != 0
            if counts:
                word = bundles[uint64(row), uint32(bundles.shape[1] - words + place)]
                for index in range(at_once):
                    for b in range(batch):
                        total[b, index] += weight(word, index) * factor[b]
        for b in range(batch):
            for index in range(at_once):
                sums[cuda.threadIdx.y, b * at_once + index, cuda.threadIdx.x] = total[b, index]
        cuda.syncthreads()
        if cuda.threadIdx.y == 0 and place < words:
            for result in range(results):
                whole = float32(0)
                for warp in range(cuda.blockDim.y):
                    whole += sums[warp, result, cuda.threadIdx.x]
                partials[part, result // at_once, place * uint32(at_once) + uint32(result % at_once)] = whole

    return add_columns
