"""Products and decoding with ggml's functions of a row, on the toolkit's threads."""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import FROM_FLOAT32
from toolkit.kernels.engine.simd import I8, I32, I64, prefetch

AHEAD = 4096  # bytes: the hardware's own prefetching stops at the end of a page
BYTE = I8.as_pointer()
VOID = ir.VoidType()


def _call(builder, address, *arguments) -> None:
    """Call a C function without a result."""
    kind = ir.FunctionType(VOID, [argument.type for argument in arguments])
    builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


@intrinsic
def dot(typing_context, function, columns, out, place, row, at, vector, start):
    """Set `out.flat[place]` to the product of the row at `row.flat[at]` and the vector at `vector.flat[start]`."""

    def generate(context, builder, signature, arguments):
        function, columns = arguments[:2]
        sources = [
            simd.pointer(context, builder, signature.args[k], arguments[k], arguments[k + 1], I8) for k in (2, 4, 6)
        ]
        none = I64(0)
        _call(
            builder, function, builder.trunc(columns, I32), sources[0], none, sources[1], none, sources[2], none, I32(1)
        )
        return context.get_dummy_value()

    place = types.int64
    return types.void(place, place, out, place, row, place, vector, place), generate


@intrinsic
def convert(typing_context, function, source, at, target, place, count):
    """Call `function(&source.flat[at], &target.flat[place], count)`."""

    def generate(context, builder, signature, arguments):
        pointers = [
            simd.pointer(context, builder, signature.args[k], arguments[k], arguments[k + 1], I8) for k in (1, 3)
        ]
        _call(builder, arguments[0], *pointers, arguments[5])
        return context.get_dummy_value()

    number = types.int64
    return types.void(number, source, number, target, number, number), generate


@compiled
def quantise(function, x, rounded):
    """Round each vector of x, fp32 [vectors, columns], to blocks, bytes [vectors, bytes]."""
    for vector in range(len(x)):
        convert(function, x, vector * x.shape[1], rounded, vector * rounded.shape[1], x.shape[1])


@compiled
def product(function, data, columns, rounded, y, first, last):
    """Set `y[vector, row]` to the product of rows of blocks with rounded vectors."""
    nbytes = data.shape[1]
    for row in range(first, last):
        at = row * nbytes
        for line in range(0, nbytes, simd.CACHE_LINE):
            prefetch(data, at + AHEAD + line)
        for vector in range(len(rounded)):
            dot(function, columns, y, vector * y.shape[1] + row, data, at, rounded, vector * rounded.shape[1])


@cache
def decoded(dtype: object):
    """The compiled function that decodes rows into `out`, which holds the bits of `dtype`."""
    to_bits = FROM_FLOAT32[dtype]

    @compiled
    def decoded(function, data, out, first, last):
        found = np.empty(out.shape[1], np.float32)
        for row in range(first, last):
            convert(function, data, row * data.shape[1], found, 0, found.size)
            for column in range(found.size):
                out[row, column] = to_bits(found[column])

    return decoded
