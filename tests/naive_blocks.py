"""Blocks of GGUF files decoded by the package `gguf`, and vectors rounded as llama.cpp rounds them: slow and plain."""

import numpy as np
from gguf import GGMLQuantizationType, dequantize

# types of blocks of 32 columns; the others have 256, and vectors are rounded in blocks of as many
NARROW = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4")


def decoded(name, data, shape):
    """The matrix of this shape, fp64."""
    return np.array(dequantize(data.numpy(), GGMLQuantizationType[name]), np.float64).reshape(shape)


def rounded(name, x):
    """Vectors [vectors, columns] with integers from −127 to 127 and a scale for each block, fp64."""
    width = 32 if name in NARROW else 256
    parts = x.reshape(len(x), -1, width)
    largest = np.abs(parts).max(-1, keepdims=True)
    steps = np.float32(127) / np.where(largest > 0, largest, np.float32(1))
    scales = largest / np.float32(127)
    if width == 32:
        scales = scales.astype(np.float16)
    return (np.rint(parts * steps) * scales.astype(np.float64)).reshape(x.shape)


def product(name, data, x):
    """The products with rounded vectors, and how far sums in fp32 may be off."""
    weight, given = decoded(name, data, (len(data), x.shape[1])), rounded(name, x)
    # types with minima multiply these by sums of the vector, in fp16
    loose = 2**-10 if name in ("Q4_1", "Q5_1") else 0
    return given @ weight.T, (1e-5 + loose) * (np.abs(given) @ np.abs(weight).T) + 1e-12
