"""Stored bits into fp32 and back, one element at a time: compiled for CPUs and GPUs from the same source.

Types are named as torch names them, so that no table here needs torch: `ByType` takes its types, too.
"""

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


class ByType(dict[str, Any]):
    """Something for each type, by its name, such as "bfloat16", or by torch's type."""

    def __missing__(self, dtype: object) -> Any:
        """The entry of torch's type."""
        if isinstance(dtype, str):
            raise KeyError(dtype)
        return self[str(dtype).removeprefix("torch.")]


@intrinsic
def as_float32(typing_context, bits):
    """The fp32 number that these 32 bits are."""
    return types.float32(types.uint32), lambda context, builder, signature, values: builder.bitcast(
        values[0], ir.FloatType()
    )


@intrinsic
def as_bits(typing_context, value):
    """The 32 bits that this fp32 number is."""
    return types.uint32(types.float32), lambda context, builder, signature, values: builder.bitcast(
        values[0], ir.IntType(32)
    )


@numba.njit(inline="always")
def float32_from_bfloat16(bits):
    """bf16 is the upper half of fp32."""
    return as_float32(numba.uint32(bits) << numba.uint32(16))


@numba.njit(inline="always")
def float32_from_float16(bits):
    """fp16 to fp32 in integer arithmetic, for processors that have no such instruction; exact, subnormals included."""
    magnitude = numba.uint32(bits & 0x7FFF) << numba.uint32(13)
    sign = numba.uint32(bits & 0x8000) << numba.uint32(16)
    exponent = magnitude & numba.uint32(0x0F800000)
    magnitude = numba.uint32(magnitude + numba.uint32(112 << 23))  # the exponent's bias: 127 − 15
    if exponent == numba.uint32(0x0F800000):  # infinities and NaNs
        magnitude = numba.uint32(magnitude + numba.uint32(112 << 23))
    elif exponent == 0:  # zero and subnormals: let a subtraction normalise them
        magnitude = numba.uint32(magnitude + numba.uint32(1 << 23))
        value = as_float32(magnitude) - as_float32(numba.uint32(113 << 23))
        return -value if sign else value
    return as_float32(magnitude | sign)


@numba.njit(inline="always")
def float32_from_float32(bits):
    """The bits as they are."""
    return as_float32(bits)


@numba.njit(inline="always")
def float32_from_int8(bits):
    """The signed integer as fp32."""
    return numba.float32(numba.int8(bits))


@numba.njit(inline="always")
def float32_bits(value):
    """The bits of an fp32 number."""
    return as_bits(numba.float32(value))


@numba.njit(inline="always")
def bfloat16_bits(value):
    """The bits of the nearest bf16 number, ties to even."""
    bits = as_bits(numba.float32(value))
    odd = bits >> numba.uint32(16) & numba.uint32(1)
    rounded = numba.uint32(bits + numba.uint32(0x7FFF) + odd) >> numba.uint32(16)
    return numba.uint16(rounded) if value == value else numba.uint16(0x7FC0)


@numba.njit(inline="always")
def float16_bits(value):
    """The bits of the nearest fp16 number, ties to even, in integer arithmetic; subnormals included."""
    bits = as_bits(numba.float32(value))
    sign = numba.uint32(bits & numba.uint32(0x80000000))
    magnitude = numba.uint32(bits ^ sign)
    if magnitude >= numba.uint32((127 + 16) << 23):  # too large, an infinity or a NaN
        rounded = numba.uint32(0x7E00) if magnitude > numba.uint32(255 << 23) else numba.uint32(0x7C00)
    elif magnitude < numba.uint32(113 << 23):  # subnormal: an addition rounds at the last bit that fp16 has
        half = numba.uint32(126 << 23)
        rounded = numba.uint32(as_bits(as_float32(magnitude) + as_float32(half)) - half)
    else:
        odd = magnitude >> numba.uint32(13) & numba.uint32(1)
        rebased = numba.uint32(magnitude - numba.uint32(112 << 23))  # the exponent's bias: 127 − 15
        rounded = numba.uint32(rebased + numba.uint32(0xFFF) + odd) >> numba.uint32(13)
    return numba.uint16(rounded | sign >> numba.uint32(16))


ITEM_BYTES = ByType(float32=4, float16=2, bfloat16=2, int8=1)
FROM_FLOAT32 = ByType(float32=float32_bits, float16=float16_bits, bfloat16=bfloat16_bits)
TO_FLOAT32 = ByType(
    float32=float32_from_float32,
    float16=float32_from_float16,
    bfloat16=float32_from_bfloat16,
    int8=float32_from_int8,
)
