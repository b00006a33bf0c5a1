"""Blocks of GGUF files: decoded as by the package `gguf`, and multiplied as llama.cpp multiplies."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tests import naive_blocks
from tests.kernels.families import at_the_end_of_memory
from toolkit.errors import UserError
from toolkit.formats.ggml import TYPES
from toolkit.formats.twins import random_blocks
from toolkit.kernels import blocks
from toolkit.kernels.blocks import PLAIN, ggml, tensors
from toolkit.kernels.engine.parallel import Program, stages

ROUNDED = [name for name in TYPES if name not in PLAIN]
WAYS = [(name, way) for name in ROUNDED for way in blocks.backends(name).available() if way != "gguf"]


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
    return naive_blocks.decoded(packed.name, packed.data, packed.shape)


def check_product(packed, way, *counts, seed=0):
    """Products with so many vectors at once."""
    weight, random = decoded(packed), np.random.default_rng(seed)
    given = random.standard_normal((max(counts), packed.shape[1]), np.float32)
    expected, allowed = naive_blocks.product(packed.name, packed.data, given)
    for count in counts:
        x = given[:count]
        found = tensors.matvec(packed.name, packed.data, torch.from_numpy(x), backend=way).numpy()
        np.testing.assert_array_less(np.abs(found - expected[:count]), allowed[:count])
        # against the vector itself: half a step of its blocks' largest element, and half a unit of scales in fp16
        off = np.abs(x).max() * (1 / 254 + 2**-11) * np.abs(weight).sum(1)
        np.testing.assert_array_less(np.abs(found - x @ weight.T), off + allowed[:count])


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
        check_product(random_blocks(name, rows, columns // elements * elements), way, 1, 2, 7, 32)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_products_with_many_vectors(name, way):
    """With panels of sixteen rows and groups of eight vectors, whole ones and others; long rows have few panels."""
    elements, random = TYPES[name].layout.elements, np.random.default_rng(0)
    longest = [(70, 8960)] if name in ("Q4_K", "Q6_K", "Q8_0") else []
    for rows, columns in longest:
        check_product(random_blocks(name, rows, columns), way, 33)
    for seed in range(4):
        rows, blocks_of_row, vectors = (int(random.integers(1, most)) for most in (70, 9, 60))
        check_product(random_blocks(name, rows, blocks_of_row * elements, seed), way, 32 + vectors, seed=seed)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("name", ["F16", "Q4_K", "IQ2_S", "MXFP4"])
def test_without_the_library(name):
    packed = random_blocks(name, 300, 512)
    assert torch.equal(packed.decode(), torch.from_numpy(decoded(packed)).float())
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    wanted = x.double() @ torch.from_numpy(decoded(packed)).T
    found, out = tensors.matvec(name, packed.data, x, backend="gguf"), torch.empty(300)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    Program(stages([packed.product(x[0], out)])).run()
    torch.testing.assert_close(out.double(), wanted[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", TYPES)
def test_one_product_is_the_same_again_and_again(name):
    """Products with one vector share what prepares it, and take what it holds at each run."""
    given = [random_blocks(name, rows, 512, seed) for seed, rows in enumerate((33, 7, 5))]
    one, other = torch.zeros(2, 512)
    vectors, outs = (one, one, other), [torch.zeros(packed.shape[0]) for packed in given]
    each = list(zip(given, vectors, outs, strict=True))
    program = Program(stages([packed.product(x, out) for packed, x, out in each]))
    assert len(program.tasks) == (3 if name in PLAIN else 5)
    for seed in range(2):
        for number, x in enumerate((one, other)):
            x.copy_(torch.randn(512, generator=torch.Generator().manual_seed(10 * number + seed)))
        program.run()
        assert all(torch.equal(out, packed.matvec(x)) for packed, x, out in each)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_any_bytes_are_taken(name, way):
    """Bytes at the end of their memory: nothing behind them is read, whatever they say."""
    layout = TYPES[name].layout
    for fill in (0, 0x7C, 0xFF, None):
        data = np.full((3, 1024 // layout.elements * layout.nbytes), fill or 0, np.uint8)
        if fill is None:
            data[:] = np.random.default_rng(0).integers(0, 256, data.shape, np.uint8)
        packed = TYPES[name]((3, 1024), at_the_end_of_memory(torch.from_numpy(data)))
        packed.decode()
        for vectors in (1, 5, 33):
            for x in (torch.ones(vectors, 1024), torch.full((vectors, 1024), torch.nan), torch.zeros(vectors, 1024)):
                found = tensors.matvec(name, packed.data, x, backend=way)
                assert found.shape == (vectors, 3)
    assert torch.equal(tensors.matvec(name, random_blocks(name, 3, 1024).data, x), torch.zeros(vectors, 3))


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
    with pytest.raises(ValueError, match=r"data is torch.uint8 \[2, 144\]; expected torch.uint8 \[3, 144\]"):
        TYPES["Q4_K"]((3, 256), data)
    with pytest.raises(UserError, match="llama-quantize"):
        TYPES["Q4_K"].encode(torch.zeros(2, 256))


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
