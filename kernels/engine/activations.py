"""Activation functions as scalar maths: compiled for CPUs and GPUs from the same source."""

import math

import numba
import numpy as np

HALF_ROOT, ROOT_TWO_OVER_PI, CUBIC = (np.float32(v) for v in (math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715))


@numba.njit(inline="always")
def relu(value):
    """max(value, 0); a NaN stays."""
    return numba.float32(0) if value < 0 else value


@numba.njit(inline="always")
def relu2(value):
    """The square of relu (Persimmon)."""
    return numba.float32(0) if value < 0 else value * value


@numba.njit(inline="always")
def silu(value):
    """value · sigmoid(value)."""
    return value / (numba.float32(1) + math.exp(-value))


@numba.njit(inline="always")
def gelu(value):
    """value · Φ(value), by the error function."""
    return numba.float32(0.5) * value * (numba.float32(1) + math.erf(value * HALF_ROOT))


@numba.njit(inline="always")
def gelu_tanh(value):
    """The usual approximation of gelu by tanh."""
    inner = ROOT_TWO_OVER_PI * (value + CUBIC * value * value * value)
    return numba.float32(0.5) * value * (numba.float32(1) + math.tanh(inner))


# by the names that transformers' configurations give them
ACTIVATIONS = {
    "relu": relu,
    "relu2": relu2,
    "silu": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}
