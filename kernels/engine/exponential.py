"""The exponential and the activations that need it, in a form that LLVM makes lanes of: for CPUs.

The library's exponential takes one number at a time; with it, the gates of a token take longer than its norms,
rotations and attention together.
"""

import math

import numba
import numpy as np
from numba import literal_unroll

from toolkit.kernels.engine.activations import ACTIVATIONS, CUBIC, ROOT_TWO_OVER_PI
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import as_float32

# ln 2 in two parts, of which multiples of the first are exact, and the exponential's Taylor series, last term first
PER_LN_2, LN_2_HIGH, LN_2_LOW = (np.float32(value) for value in (1.4426950408889634, 0.693359375, -2.12194440e-4))
SERIES = tuple(np.float32(1 / math.factorial(power)) for power in range(7, -1, -1))
LOWEST, HIGHEST = np.float32(-87), np.float32(89)  # the exponential is a normal number, and infinity


@compiled(forceinline=True)
def exp(x):
    """The exponential of an fp32 number, to some 2 · 10⁻⁷: at least e⁻⁸⁷, infinite above 88.4, NaN of NaN."""
    x = LOWEST if x < LOWEST else HIGHEST if x > HIGHEST else x
    power = np.rint(x * PER_LN_2)
    rest = (x - power * LN_2_HIGH) - power * LN_2_LOW
    total = SERIES[0]
    for factor in literal_unroll(SERIES[1:]):
        total = total * rest + factor
    return total * as_float32(numba.uint32((numba.int32(power) + 127) << 23))


@numba.njit(inline="always")
def silu(value):
    """value · sigmoid(value)."""
    return value / (numba.float32(1) + exp(-value))


@numba.njit(inline="always")
def gelu_tanh(value):
    """The usual approximation of gelu by tanh, as a sigmoid: (1 + tanh(z)) / 2 = 1 / (1 + exp(−2z))."""
    inner = ROOT_TWO_OVER_PI * (value + CUBIC * value * value * value)
    return value / (numba.float32(1) + exp(numba.float32(-2) * inner))


IN_LANES = ACTIVATIONS | {"silu": silu, "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh}
