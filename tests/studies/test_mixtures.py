"""Mixtures of llama.cpp: its own choice of types, and weights that are what the stored blocks decode to."""

import ctypes

import gguf
import numpy as np
import pytest
import torch

from tests.models.test_twins import TOYS
from toolkit.errors import UserError
from toolkit.interchange.gguf import LINEARS
from toolkit.measure import llama_cpp_quantiser
from toolkit.measure.llama_cpp_quantiser import GgufMatrix
from toolkit.models import decoder_blocks, decoder_linears, shapes
from toolkit.models.twins import twin_model
from toolkit.studies.forms import store
from toolkit.studies.mixtures import tensor_type, type_shares

# What `llama_model_quantize` (the build in the npm package node-llama-cpp 3.22.1) made of Llama models with these many
# layers and columns: one letter a layer. Operations that are not named have the type that stands first.
LETTERS = dict(zip("458cdef1", ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_1"), strict=True))
CHOSEN = [
    ("Q8_0", 30, 64, "8", {}),
    ("Q4_0", 9, 256, "4", {}),
    ("Q3_K_S", 30, 64, "4", {}),
    ("Q3_K_S", 9, 256, "c", {}),
    ("Q3_K_M", 30, 64, "4", {"attn_v": "11" + 28 * "5", "attn_output": 30 * "5"}),
    ("Q3_K_M", 30, 256, "c", {"ffn_down": "e" + 29 * "d"}),
    ("Q3_K_M", 9, 256, "c", {"attn_v": "eeddddddd", "attn_output": 9 * "d", "ffn_down": 9 * "d"}),
    ("Q4_K_M", 30, 64, "5", {"attn_v": "888558558558558558558558558888"}),
    ("Q4_K_M", 30, 256, "d", {"ffn_down": "fffddfddfddfddfddfddfddfddffff"}),
    ("Q4_K_M", 9, 256, "d", {"attn_v": "fddfddfff", "ffn_down": "fddfddfff"}),
]


def test_types_are_those_that_llama_cpp_chose():
    for mixture, layers, columns, most, others in CHOSEN:
        every = {tensor: others.get(tensor, layers * most) for tensor in LINEARS.values()}
        compared = others if layers == 30 and columns == 256 else every
        if columns == 64:
            compared.pop("ffn_down")  # its rows were longer there
        for tensor, letters in compared.items():
            found = [tensor_type(mixture, tensor, layer, layers, columns) for layer in range(layers)]
            assert found == [LETTERS[letter] for letter in letters], (mixture, tensor)
    for arguments, words in (
        (("Q4_K", "ffn_down", 0, 2, 256), "'Q4_K'"),
        (("Q4_0", "ffn_down", 0, 2, 40), "40 columns"),
    ):
        with pytest.raises(UserError, match=words):
            tensor_type(*arguments)


def quantize_chunk(kind, values, result, first, rows, columns, importance):
    """As ggml's function, by the package `gguf`."""
    assert (first, importance) == (0, None)
    weights = np.ctypeslib.as_array(ctypes.cast(values, ctypes.POINTER(ctypes.c_float)), (rows, columns))
    data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(kind))
    ctypes.memmove(result, data.tobytes(), data.nbytes)
    return data.nbytes


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "toy-llama", TOYS["toy-llama"])
    monkeypatch.setattr(llama_cpp_quantiser, "_quantize_chunk", lambda: quantize_chunk)
    return twin_model("toy-llama", 2)


def linears(model):
    return [linear for block in decoder_blocks(model) for linear in decoder_linears(block).values()]


def test_weights_are_what_the_blocks_decode_to(model):
    before = [linear.weight.clone() for linear in linears(model)]
    assert type_shares(model, "Q8_0") == "Q8_0 100.0 %"
    assert type_shares(model, "Q3_K_S") == "Q4_0 100.0 %"  # no row is 256 long
    with pytest.raises(UserError, match="Q4_K: rows of 384 values"):  # else llama.cpp writes beyond its buffer
        GgufMatrix.encode(torch.zeros(2, 384), "Q4_K")
    nbytes = store(model, "Q8_0, llama.cpp")
    assert 8 * nbytes == 8.5 * sum(weight.numel() for weight in before)  # a scale in fp16 for 32 weights
    for linear, weight in zip(linears(model), before, strict=True):
        groups = weight.float().view(-1, 32)
        steps = groups.abs().amax(1, keepdim=True) / 127
        off = (linear.weight.float().view(-1, 32) - groups).abs()
        assert (off <= 0.51 * steps + 2e-3 * groups.abs()).all()
        assert torch.equal(linear.weight, GgufMatrix.encode(weight, "Q8_0").decode().to(weight.dtype))


def test_a_model_with_other_linears_is_refused(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "toy-opt", TOYS["toy-opt"])
    with pytest.raises(UserError, match="has fc1: expected self_attn"):
        store(twin_model("toy-opt", 1), "Q4_0, llama.cpp")
