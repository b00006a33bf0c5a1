"""Blocks of GGUF files: decoded as by the package `gguf`, and multiplied as llama.cpp does, whose rounding is here."""

import ctypes
import mmap

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from toolkit.errors import UserError
from toolkit.formats.ggml import TYPES
from toolkit.formats.twins import random_blocks
from toolkit.kernels import blocks
from toolkit.kernels.blocks import PLAIN, ggml
from toolkit.kernels.engine.parallel import Program, stages

ROUNDED = [name for name in TYPES if name not in PLAIN]
WAYS = [(name, way) for name in ROUNDED for way in blocks.backends(name).available() if way != "gguf"]


NOBODY = 0  # PROT_NONE of mprotect


@pytest.fixture
def no_library(monkeypatch):
    def forget():
        ggml.functions.cache_clear()
        blocks.backends.cache_clear()

    monkeypatch.setattr(ggml, "library", lambda: None)
    forget()
    yield
    forget()


def decoded(packed):
    """The fp64 matrix by the package `gguf`."""
    kind = GGMLQuantizationType[packed.name]
    return np.array(dequantize(packed.data.numpy(), kind), np.float64).reshape(packed.shape)


def rounded(name, x):
    """Vectors as llama.cpp rounds them for the product: 8 bits, a scale for every 32 columns, or 256."""
    width = 256 if ggml.functions(name).rounded == "Q8_K" else 32
    parts = x.reshape(len(x), -1, width)
    largest = np.abs(parts).max(-1, keepdims=True)
    steps = np.float32(127) / np.where(largest > 0, largest, np.float32(1))
    scales = largest / np.float32(127)
    if width == 32:
        scales = scales.astype(np.float16)
    return (np.rint(parts * steps) * scales.astype(np.float64)).reshape(x.shape)


def check_product(packed, way, vectors, seed=0):
    x = np.random.default_rng(seed).standard_normal((vectors, packed.shape[1]), np.float32)
    weight = decoded(packed)
    found = blocks.matvec(packed.name, packed.data, torch.from_numpy(x), backend=way).numpy()
    given = rounded(packed.name, x)
    magnitude = np.abs(given) @ np.abs(weight).T
    # types with minima multiply these by sums of the vector, in fp16
    loose = 2**-10 if packed.name in ("Q4_1", "Q5_1") else 0
    np.testing.assert_array_less(np.abs(found - given @ weight.T), (1e-5 + loose) * magnitude + 1e-12)
    # against the vector itself: half a step of its blocks' largest element, and half a unit of scales in fp16
    off = np.abs(x).max() * (1 / 254 + 2**-11 + loose)
    np.testing.assert_array_less(np.abs(found - x @ weight.T), off * np.abs(weight).sum(1) + 1e-5 * magnitude)


@pytest.mark.parametrize("name", TYPES)
def test_sizes_are_those_of_gguf(name):
    kind, layout = GGMLQuantizationType[name], TYPES[name].layout
    assert (layout.number, layout.elements, layout.nbytes) == (kind.value, *GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("name", TYPES)
def test_decodes_as_gguf_does(name):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = random_blocks(name, 5, 512)
        packed = TYPES[name](given.shape, given.data, dtype)
        assert torch.equal(packed.decode(), torch.from_numpy(decoded(given)).float().to(dtype))
        assert packed.nbytes == given.data.nbytes == packed.expected_nbytes(packed.shape, 0, dtype)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_products_are_those_of_rounded_vectors(name, way):
    elements = TYPES[name].layout.elements
    for rows, columns in ((1, elements), (5, 3 * elements), (37, 1024 + elements)):
        packed = random_blocks(name, rows, columns // elements * elements)
        for vectors in (1, 2, 7, 32):
            check_product(packed, way, vectors)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("name", ["F16", "Q4_K", "IQ2_S", "MXFP4"])
def test_without_the_library(name):
    packed = random_blocks(name, 300, 512)
    assert torch.equal(packed.decode(), torch.from_numpy(decoded(packed)).float())
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    wanted = x.double() @ torch.from_numpy(decoded(packed)).T
    found, out = blocks.matvec(name, packed.data, x, backend="gguf"), torch.empty(300)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    Program(stages([packed.product(x[0], out)])).run()
    torch.testing.assert_close(out.double(), wanted[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", TYPES)
def test_one_product_is_the_same_again_and_again(name):
    """Products with one vector share what prepares it, and take what it holds at each run."""
    given = [random_blocks(name, rows, 512, seed) for seed, rows in enumerate((33, 7))]
    x, outs = torch.zeros(512), [torch.zeros(33), torch.zeros(7)]
    program = Program(stages([packed.product(x, out) for packed, out in zip(given, outs, strict=True)]))
    assert len(program.tasks) == (2 if name in PLAIN else 3)
    for seed in range(2):
        x.copy_(torch.randn(512, generator=torch.Generator().manual_seed(seed)))
        program.run()
        for packed, out in zip(given, outs, strict=True):
            assert torch.equal(out, packed.matvec(x))


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_any_bytes_are_taken(name, way):
    """Bytes at the end of their memory: nothing behind them is read, whatever they say."""
    layout = TYPES[name].layout
    for fill in (0, 0x7C, 0xFF, None):
        data = np.full((3, 1024 // layout.elements * layout.nbytes), fill or 0, np.uint8)
        if fill is None:
            data[:] = np.random.default_rng(0).integers(0, 256, data.shape, np.uint8)
        packed = TYPES[name]((3, 1024), at_the_end_of_memory(data))
        packed.decode()
        for vectors in (1, 5):
            for x in (torch.ones(vectors, 1024), torch.full((vectors, 1024), torch.nan), torch.zeros(vectors, 1024)):
                found = blocks.matvec(name, packed.data, x, backend=way)
                assert found.shape == (vectors, 3)
    assert torch.equal(blocks.matvec(name, random_blocks(name, 3, 1024).data, x), torch.zeros(vectors, 3))


def at_the_end_of_memory(data):
    """A copy, behind which lies a page that nobody may read."""
    page = mmap.PAGESIZE
    size = -(-data.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(place + size), page, NOBODY) == 0
    copy = torch.frombuffer(memory, dtype=torch.uint8, offset=size - data.nbytes, count=data.nbytes)
    return copy.copy_(torch.from_numpy(data).flatten()).view(data.shape)


@pytest.mark.parametrize("name", TYPES)
def test_random_blocks(name):
    packed = random_blocks(name, 64, 1024)
    weight = packed.decode()
    assert bool(weight.isfinite().all())
    assert 0.017 < weight.std() < 0.024
    assert weight.mean().abs() < 0.01
    assert torch.equal(packed.data, random_blocks(name, 64, 1024).data)
    assert not torch.equal(packed.data, random_blocks(name, 64, 1024, seed=1).data)


def test_refuses_what_is_no_such_matrix():
    data = torch.zeros(2, 144, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 256"):
        TYPES["Q4_K"]((2, 300), data)
    with pytest.raises(ValueError, match=r"data is torch.uint8 \[2, 144\]; expected torch.uint8 \[3, 144\]"):
        TYPES["Q4_K"]((3, 256), data)
    with pytest.raises(ValueError, match="not contiguous"):
        TYPES["Q4_K"]((2, 256), torch.zeros(144, 2, dtype=torch.uint8).T)
    with pytest.raises(ValueError, match="floating-point"):
        TYPES["Q4_K"]((2, 256), data, torch.int8)
    with pytest.raises(UserError, match="llama-quantize"):
        TYPES["Q4_K"].encode(torch.zeros(2, 256))
    with pytest.raises(UserError, match="Q4_L"):
        random_blocks("Q4_L", 1, 256)


def test_another_build_of_the_library(tmp_path, monkeypatch):
    used = ggml.library()
    for given in (used.file, used.file.parent):
        monkeypatch.setenv(ggml.VARIABLE, str(given))
        assert ggml.library.__wrapped__().functions("Q4_K") == used.functions("Q4_K")
    monkeypatch.setenv(ggml.VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"TOOLKIT_GGML=.*expected the file libggml-cpu.so"):
        ggml.library.__wrapped__()
    (tmp_path / "libggml-cpu.so").write_text("no library")
    with pytest.raises(UserError, match=r"is no ggml for this CPU: .*TOOLKIT_GGML names"):
        ggml.library.__wrapped__()
    monkeypatch.setattr(ggml, "host_has", lambda feature: False)
    with pytest.raises(UserError, match="it is built for CPUs with avx2"):
        ggml.Library(used.file)
