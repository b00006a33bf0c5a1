"""Activation functions as scalar maths, and the walk over bundles that all backends share."""

import math

import numba
import numpy as np

from toolkit.kernels.common.compiled import compiled

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


def ffn_of_parts(dot, add_scaled, activation: str, gated: bool):
    """The function that sets `partials[part, vector]` to the sum over a part's neurons, for parts `first` to `last`.

    `partials` [parts, vectors, hidden] splits the neurons evenly. `dot(bundles, at, ahead, x, vector)` is the product
    of the hidden numbers from `at` on with a vector; meanwhile it asks for those `ahead`, which the next neuron needs.
    `add_scaled(bundles, at, value, sums)` adds value times them to `sums` [hidden]. A bundle's down column is not read
    where the value is within the threshold: it counts as zero.
    """
    activate = ACTIVATIONS[activation]

    @compiled
    def ffn(bundles, bias, x, threshold, partials, first, last):
        rows, width, hidden, parts = len(bundles), bundles.shape[1], x.shape[1], len(partials)
        for part in range(first, last):
            partials[part] = 0
            for row in range(rows * part // parts, rows * (part + 1) // parts):
                at = row * width
                for vector in range(len(x)):
                    if gated:
                        value = activate(dot(bundles, at, width, x, vector))
                        value *= dot(bundles, at + hidden, width, x, vector)
                    else:
                        shift = bias[row] if len(bias) else numba.float32(0)
                        value = activate(dot(bundles, at, width, x, vector) + shift)
                    if not abs(value) <= threshold:  # a NaN counts
                        add_scaled(bundles, at + width - hidden, value, partials[part, vector])

    return ffn
