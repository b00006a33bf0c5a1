"""Scalar maths of the bitmap kernels: counting bits."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

WORD = 32  # columns that one bitmap word covers
# columns of a row that one warp takes, 16 bytes of bitmap a lane: their 4-byte offset weighs 0.1 % at 50 % and 16 bits
BLOCK = 4096


@intrinsic
def popcount(typing_context, word):
    """The number of set bits of an unsigned integer."""
    return types.int64(word), lambda context, builder, signature, values: builder.zext(
        builder.ctpop(values[0]), ir.IntType(64)
    )


@intrinsic
def lowest_bit(typing_context, word):
    """The place of the lowest set bit; `word` is not zero."""
    return types.int64(word), lambda context, builder, signature, values: builder.zext(
        builder.cttz(values[0], ir.Constant(ir.IntType(1), 1)), ir.IntType(64)
    )
