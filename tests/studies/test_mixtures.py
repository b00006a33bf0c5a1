"""Mixtures of llama.cpp: its own choice of types, and weights that are what the stored blocks decode to."""

import ctypes
from pathlib import Path

import gguf
import libggml
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
from toolkit.studies.mixtures import importance, tensor_type, type_shares

QUANTIZE_CHUNK = llama_cpp_quantiser._quantize_chunk.__wrapped__  # as it is, not cached
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


def test_types_of_today_by_llama_cpp_s_rules():
    """Worked by hand from `llama_tensor_get_type_impl`: eight layers, rows of 256, with an importance matrix."""
    rules = [
        ("IQ4_XS", "ffn_down", 0, "IQ4_XS"),  # Q5_K without a matrix
        ("IQ3_XXS", "attn_q", 3, "IQ2_S"),
        ("IQ3_XXS", "attn_output", 3, "IQ3_S"),
        ("IQ3_XXS", "attn_v", 3, "IQ3_XXS"),
        ("IQ3_XXS", "output", 0, "Q5_K"),
        ("IQ3_S", "output", 0, "Q6_K"),
        ("IQ2_XXS", "ffn_down", 0, "Q2_K"),
        ("IQ2_XXS", "ffn_down", 1, "IQ2_XXS"),
        ("IQ2_XXS", "attn_v", 3, "Q2_K"),
        ("Q4_0", "ffn_down", 0, "Q4_1"),
        ("Q4_0", "ffn_down", 1, "Q4_0"),
    ]
    for mixture, tensor, layer, expected in rules:
        assert tensor_type(mixture, tensor, layer, 8, 256, weighted=True) == expected, (mixture, tensor, layer)
    assert tensor_type("IQ4_XS", "ffn_down", 0, 8, 256) == "Q5_K"
    shared = [tensor_type(mixture, "attn_v", 0, 8, 256, 6, True) for mixture in ("IQ4_XS", "IQ3_S", "IQ2_XXS")]
    assert shared == ["Q5_K", "Q4_K", "Q4_K"]
    assert tensor_type("IQ3_XXS", "attn_q", 0, 8, 64, weighted=True) == "IQ4_NL"
    assert tensor_type("IQ3_XXS", "output", 0, 8, 64, weighted=True) == "Q8_0"
    with pytest.raises(UserError, match=r"IQ3_XXS: llama.cpp makes it only with an importance matrix"):
        tensor_type("IQ3_XXS", "attn_q", 0, 8, 256)


@pytest.fixture
def ggml(monkeypatch):
    """ggml itself, of the package libggml-python."""
    (folder,) = Path(libggml.__file__).parent.glob("lib*/")
    monkeypatch.setattr(llama_cpp_quantiser.llama_cpp, "library", lambda: folder / "libggml-base.so")
    monkeypatch.setattr(llama_cpp_quantiser, "_quantize_chunk", QUANTIZE_CHUNK)


def test_blocks_are_those_of_the_package_gguf(ggml):
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0"):
        expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        assert np.array_equal(GgufMatrix.encode(weight, kind).data, expected), kind


def test_an_importance_matrix_lowers_the_error_that_it_weighs(ggml):
    random = torch.Generator().manual_seed(0)
    weight, squares = torch.randn(16, 512, generator=random), torch.randn(512, generator=random).exp() ** 2

    def error(kind, *matrix):
        return float(((GgufMatrix.encode(weight, kind, *matrix).decode() - weight) ** 2 * squares).sum())

    for kind in ("IQ4_XS", "IQ4_NL", "IQ3_S", "Q4_K", "Q3_K", "Q2_K", "Q4_0"):
        assert error(kind, squares) < 0.97 * error(kind), kind
    assert error("Q4_K", squares) < error("IQ3_S", squares) < error("IQ3_XXS", squares) < error("IQ2_XXS", squares)
    with pytest.raises(UserError, match=r"IQ2_XXS: llama.cpp quantises to this type only with an importance matrix"):
        GgufMatrix.encode(weight, "IQ2_XXS")


def test_the_importance_of_a_column_is_the_mean_square_of_its_input(model):
    windows = torch.arange(24).view(2, 12)
    inputs = {linear: [] for linear in linears(model)}
    for linear, rows in inputs.items():
        linear.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(given[0].flatten(0, 1).double()))
    with torch.no_grad():
        for window in windows:
            model(window[None])
    expected = [torch.cat(rows).square().mean(0) for rows in inputs.values()]
    found = importance(model, windows)
    assert list(found)[:2] == ["blk.0.attn_q.weight", "blk.0.attn_k.weight"]
    for one, other in zip(found.values(), expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-4)


def test_a_form_with_an_importance_matrix(model, ggml):
    weights = importance(model, torch.arange(24).view(2, 12))
    layer = decoder_blocks(model)[1].mlp.gate_proj
    before = layer.weight.clone()
    assert type_shares(model, "IQ3_S", weighted=True) == "IQ4_NL 100.0 %"  # no row is 256 long
    nbytes = store(model, "IQ3_S imatrix, llama.cpp", weights)
    assert 8 * nbytes == 4.5 * sum(linear.weight.numel() for linear in linears(model))
    expected = GgufMatrix.encode(before, "IQ4_NL", weights["blk.1.ffn_gate.weight"]).decode()
    assert torch.equal(layer.weight, expected.to(before.dtype))
    assert not torch.equal(layer.weight, GgufMatrix.encode(before, "IQ4_NL").decode().to(before.dtype))


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
