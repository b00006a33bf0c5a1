"""Blocks of GGUF files: they decode as the package `gguf` decodes them."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from toolkit.errors import UserError
from toolkit.formats.ggml import TYPES


def blocks(name: str, rows: int, blocks_a_row: int, seed: int = 0):
    """A matrix of random bytes, with scales that are finite and moderate."""
    layout = TYPES[name].layout
    data = np.random.default_rng(seed).integers(0, 128, (rows, blocks_a_row * layout.nbytes), np.uint8) % 60
    return TYPES[name]((rows, blocks_a_row * layout.elements), torch.from_numpy(data))


@pytest.mark.parametrize("name", TYPES)
def test_sizes_are_those_of_gguf(name):
    kind, layout = GGMLQuantizationType[name], TYPES[name].layout
    assert (layout.number, layout.elements, layout.nbytes) == (kind.value, *GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TYPES)
def test_decodes_as_gguf_does(name, dtype):
    given = blocks(name, 5, 2)
    packed = TYPES[name](given.shape, given.data, dtype)
    wanted = torch.from_numpy(np.array(dequantize(given.data.numpy(), GGMLQuantizationType[name])))
    assert torch.equal(packed.decode(), wanted.to(dtype))
    assert packed.nbytes == given.data.nbytes == packed.expected_nbytes(packed.shape, 0, dtype)


def test_refuses_what_is_no_such_matrix():
    data = torch.zeros(2, 144, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 256"):
        TYPES["Q4_K"]((2, 300), data)
    with pytest.raises(ValueError, match=r"data is torch.uint8 \[2, 144\]; expected torch.uint8 \[3, 144\]"):
        TYPES["Q4_K"]((3, 256), data)
    with pytest.raises(ValueError, match="floating-point"):
        TYPES["Q4_K"]((2, 256), data, torch.int8)
    with pytest.raises(UserError, match="llama-quantize"):
        TYPES["Q4_K"].encode(torch.zeros(2, 256))
