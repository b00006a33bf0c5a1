"""Dense rows times a vector, with SIMD: what the families that hold or decode dense rows share."""

from functools import cache

import numba
import numpy as np
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from toolkit.kernels.engine import simd
from toolkit.kernels.engine.backends import AVX2, Backend, Backends
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import ITEM_BYTES, TO_FLOAT32
from toolkit.kernels.engine.parallel import Task
from toolkit.kernels.engine.simd import (
    CACHE_LINE,
    LANES_TO_FLOAT32,
    Vector,
    fma,
    item,
    prefetch_l2_rows,
    prefetch_rows,
    totals,
    zeros,
)

LANES = 16  # in which a row is summed
ROWS = 4  # multiplied at once, which share what they read of x
NEAR_BYTES = 512  # how far ahead in a row the first cache is asked for its elements
# rows and vectors at once where there are several vectors, as many as the registers hold: a weight in fp32 serves all
TILES = {"avx512f": (4, 4), "avx2": (2, 2)}


@intrinsic(prefer_literal=True)
def load_tile(typing_context, array, at, stride, times, stretches, lanes):
    """The `lanes` elements from `at` so many times, then those from `at + stride` and so on, as one vector."""
    vector = Vector(array.dtype, times.literal_value * stretches.literal_value * lanes.literal_value)

    def generate(context, builder, signature, arguments):
        data, place, stride = arguments[:3]
        kind, parts = context.get_value_type(Vector(array.dtype, lanes.literal_value)), []
        for _ in range(stretches.literal_value):
            source = simd.pointer(context, builder, array, data, place, kind)
            parts += [builder.load(source, align=array.dtype.bitwidth // 8)] * times.literal_value
            place = builder.add(place, stride)
        return simd.join(builder, parts)

    return vector(array, types.int64, types.int64, times, stretches, lanes), generate


@intrinsic(prefer_literal=True)
def repeat(typing_context, vector, times):
    """The vector, so many times one after another."""
    repeated = Vector(vector.element, vector.lanes * times.literal_value)

    return repeated(vector, times), lambda context, builder, signature, arguments: simd.take(
        builder, arguments[0], [*range(vector.lanes)] * times.literal_value
    )


@intrinsic(prefer_literal=True)
def store_rows(typing_context, array, at, stride, vector, rows):
    """Write the first `rows` lanes from `at` on, the next ones from `at + stride` on and so on."""

    def generate(context, builder, signature, arguments):
        array_value, place, stride, value = arguments[:4]
        count = rows.literal_value
        for first in range(0, vector.lanes, count):
            some = simd.take(builder, value, range(first, first + count))
            target = simd.pointer(context, builder, array, array_value, place, some.type)
            builder.store(some, target, align=array.dtype.bitwidth // 8)
            place = builder.add(place, stride)

    return types.void(array, types.int64, types.int64, vector, rows), generate


@intrinsic(prefer_literal=True)
def load_rows(typing_context, array, starts, column, lanes):
    """The `lanes` elements from `starts[0] + column`, then those from `starts[1] + column` and so on, as one vector."""
    vector = Vector(array.dtype, starts.count * lanes.literal_value)

    def generate(context, builder, signature, arguments):
        kind = context.get_value_type(Vector(array.dtype, lanes.literal_value))
        places = (builder.add(start, arguments[2]) for start in unpack_tuple(builder, arguments[1], starts.count))
        sources = (simd.pointer(context, builder, array, arguments[0], place, kind) for place in places)
        return simd.join(builder, [builder.load(source, align=array.dtype.bitwidth // 8) for source in sources])

    return vector(array, starts, types.int64, lanes), generate


# the first of some rows, that many, as a tuple: of rows that follow each other, or that are listed
IN_TURN = {
    1: numba.njit(inline="always")(lambda at, stride: (at,)),
    2: numba.njit(inline="always")(lambda at, stride: (at, at + stride)),
    4: numba.njit(inline="always")(lambda at, stride: (at, at + stride, at + 2 * stride, at + 3 * stride)),
}
LISTED = {
    1: numba.njit(inline="always")(lambda places, i: (places[i],)),
    2: numba.njit(inline="always")(lambda places, i: (places[i], places[i + 1])),
    4: numba.njit(inline="always")(lambda places, i: (places[i], places[i + 1], places[i + 2], places[i + 3])),
}


@cache
def multiply_tile(rows: int, vectors: int, dtype: object):
    """The function that multiplies the rows that begin at `starts`, so many, with the vectors from `vector` on.

    Meanwhile the second cache is asked for the rows that begin `behind` these, since the hardware's own prefetching
    stops at the end of a page, and the first cache for what comes next in these.
    """
    lanes_to_float32, to_float32 = LANES_TO_FLOAT32[dtype], TO_FLOAT32[dtype]
    line, near = CACHE_LINE // ITEM_BYTES[dtype], NEAR_BYTES // ITEM_BYTES[dtype]
    steps, lanes = max(1, line // LANES), rows * vectors * LANES

    @numba.njit(inline="always")
    def add(weight, starts, column, x, place, sums):
        weights = lanes_to_float32(load_rows(weight, starts, column, LANES))
        return fma(repeat(weights, vectors), load_tile(x, place + column, x.shape[1], rows, vectors, LANES), sums)

    @compiled(forceinline=True)
    def multiply_tile(weight, starts, behind, x, vector, y, place):
        columns, sums, first = x.shape[1], zeros(lanes), vector * x.shape[1]
        column, whole = numba.int64(0), columns // LANES * LANES
        for _ in range(columns // (LANES * steps)):
            prefetch_l2_rows(weight, behind, column)
            prefetch_rows(weight, starts, column + near)
            for _ in range(steps):
                sums = add(weight, starts, column, x, first, sums)
                column += LANES
        while column < whole:
            sums = add(weight, starts, column, x, first, sums)
            column += LANES
        store_rows(y, vector * y.shape[1] + place, y.shape[1], totals(sums, LANES), rows)
        for v in range(vector, vector + vectors):
            for r in range(rows):
                for rest in range(whole, columns):
                    y[v, place + r] += to_float32(item(weight, starts[r] + rest)) * x[v, rest]

    return multiply_tile


def _tiles(dtype: object) -> tuple:
    """The functions for one row, for four, and for rows and vectors at once; then these two numbers."""
    at_once, vectors = TILES["avx512f"] if simd.has("avx512f") else TILES["avx2"]
    return *(multiply_tile(*tile, dtype) for tile in ((1, 1), (ROWS, 1), (at_once, vectors))), at_once, vectors


@cache
def multiply_rows(dtype: object):
    """The function that sets `y[vector, place + i]` to the product of row i with a vector, for 4 or 1 rows.

    That is Σ weight.flat[at + i · stride + column] · x[vector, column] over the columns of x. `weight` holds elements
    of `dtype`, those of 16 bits as their bits. A row's sum is the same, to the bit, for any number of rows and vectors.
    """
    of_one, of_four, of_tile, at_once, vectors = _tiles(dtype)
    one, some, four = IN_TURN[1], IN_TURN[at_once], IN_TURN[ROWS]

    @compiled
    def multiply_rows(weight, at, stride, rows, x, y, place):
        if rows == 1:
            for vector in range(len(x)):
                of_one(weight, one(at, stride), one(at + stride, stride), x, vector, y, place)
            return
        tiled, behind = len(x) // vectors * vectors, at + ROWS * stride
        for vector in range(0, tiled, vectors):
            for i in range(0, ROWS, at_once):
                starts, later = some(at + i * stride, stride), some(behind + i * stride, stride)
                of_tile(weight, starts, later, x, vector, y, place + i)
        for vector in range(tiled, len(x)):
            of_four(weight, four(at, stride), four(behind, stride), x, vector, y, place)

    return multiply_rows


@cache
def multiply_listed(dtype: object):
    """The same for rows that begin at the first of `places` [8], 4 or 1; the others say where later rows begin."""
    of_one, of_four, of_tile, at_once, vectors = _tiles(dtype)
    one, some, four = LISTED[1], LISTED[at_once], LISTED[ROWS]

    @compiled
    def multiply_listed(weight, places, rows, x, y, place):
        if rows == 1:
            for vector in range(len(x)):
                of_one(weight, one(places, 0), one(places, 1), x, vector, y, place)
            return
        tiled = len(x) // vectors * vectors
        for vector in range(0, tiled, vectors):
            for i in range(0, ROWS, at_once):
                of_tile(weight, some(places, i), some(places, ROWS + i), x, vector, y, place + i)
        for vector in range(tiled, len(x)):
            of_four(weight, four(places, 0), four(places, ROWS), x, vector, y, place)

    return multiply_listed


@cache
def dense_product(dtype: object):
    """The function that sets `y[vector, row] = Σ weight[row, column] · x[vector, column]`, rows `first` to `last`."""
    multiply = multiply_rows(dtype)

    @compiled
    def dense_product(weight, x, y, first, last):
        columns, whole = x.shape[1], first + (last - first) // ROWS * ROWS
        for row in range(first, whole, ROWS):
            multiply(weight, row * columns, columns, ROWS, x, y, row)
        for row in range(whole, last):
            multiply(weight, row * columns, columns, 1, x, y, row)

    return dense_product


@cache
def portable(dtype: object):
    """The function that sets `y[vector, row] = Σ weight[row, column] · x[vector, column]`, rows `first` to `last`."""
    to_float32 = TO_FLOAT32[dtype]

    @compiled(fastmath={"reassoc", "nsz", "contract"})
    def portable(weight, x, y, first, last):
        for row in range(first, last):
            for vector in range(len(x)):
                total = numba.float32(0)
                for column in range(x.shape[1]):
                    total += to_float32(weight[row, column]) * x[vector, column]
                y[vector, row] = total

    return portable


# LLVM writes the first with wider registers where the CPU has them
BACKENDS = Backends({"avx2": Backend(AVX2, dense_product), "portable": Backend(frozenset(), portable)}, for_gpus=())


def dense_task(dtype: object, bits: np.ndarray, x: np.ndarray, y: np.ndarray, backend: str = "auto") -> Task:
    """The task that sets `y` [vectors, rows] to the products of a matrix, as its bits, with `x` [vectors, columns]."""
    return Task(BACKENDS.choose(backend).product(dtype), (bits, x, y), len(bits), bits.nbytes)
