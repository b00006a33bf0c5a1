"""Parts that the tests of all kernel families share: how matrices are made, multiplied and judged.

`SIMULATED` is whether this process has Numba's CUDA simulator, whose kernels take tensors on the CPU; `ON_GPU` whether
the CUDA kernels are tested at all, there or on a GPU.
"""

import ctypes
import dataclasses
import functools
import mmap
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests import naive_blocks, naive_spqr
from toolkit.formats.twins import random_blocks
from toolkit.kernels import bitmap, blocks, csr, dense, huffman, neurons, spqr
from toolkit.kernels.blocks import tensors as tensors_of_blocks
from toolkit.kernels.engine import tensors
from toolkit.kernels.neurons.records import SECTIONS, section_bytes
from toolkit.quantization.neuron_records import decode, record_bytes

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
ON_GPU = "NUMBA_ENABLE_CUDASIM" in os.environ
DEVICE = "cuda" if ON_GPU and not SIMULATED else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
WILD = (-(1 << 62), -(1 << 40), -1, 1, 1 << 31, (1 << 32) - 3, 1 << 40, (1 << 62) - 1)
STEPS = 127 * 256  # of an activation in 16 bits, from 0 to the largest of a tile of SpQR
EXACT = ("avx2_table", "avx2_arithmetic", "table", "arithmetic", *spqr.FOR_GPUS)  # multiply the decoded weights

on_a_cpu = pytest.mark.skipif(ON_GPU, reason="says nothing about a GPU")
needs_numba_cuda = pytest.mark.skipif(
    not tensors.find_spec("numba_cuda"), reason="needs numba-cuda: pip install -e '.[cuda]'"
)


@dataclass(frozen=True)
class Family:
    """One kind of matrix [rows, columns]; of neurons, the bundles of `rows` neurons of `columns` numbers."""

    name: str
    module: object
    make: Callable  # shape, seed -> matrix
    multiply: Callable  # matrix, x, out or None, backend -> out
    judge: Callable  # matrix, x [batch, columns], backend -> the product in fp64, and how far another may be off
    moved: Callable  # matrix, how tensors move -> matrix
    shapes: tuple = ((0, 0), (0, 32), (3, 0), (1, 1), (5, 31), (4, 32), (7, 33), (9, 64), (13, 1000), (3, 36_867))
    small: tuple = ((3, 0), (1, 1), (9, 33))  # for the simulator
    large: tuple = ((300, 5000), (7, 36_864), (3000, 1024))  # for a GPU
    step: int = 1  # what columns are a multiple of
    bits: int | None = None  # of records of neurons, which have a table of backends of their own
    alone: bool = True  # one vector gives what it gives among others, to the bit
    harmed: Callable | None = None  # matrix, generator -> one whose contents no writer makes
    decode: Callable | None = None  # matrix, out, backend -> out
    dense: Callable | None = None  # matrix, shape, seed -> the dense matrix, by an oracle
    dtypes: tuple = ()  # of dense matrices

    def available(self) -> list[str]:
        """The backends that are tested here."""
        return backends_here(self.module.BACKENDS if self.bits is None else self.module.RECORD_BACKENDS)

    def shapes_here(self) -> tuple:
        """The shapes that are tested here."""
        return self.shapes if not ON_GPU else self.small if SIMULATED else self.small + self.large

    def rows(self, shape) -> int:
        """How many numbers a product has."""
        return shape[1] if self.module is neurons else shape[0]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sparse(shape, dtype, sparsity=0.5, seed=0):
    """A matrix with this share of zeros."""
    generator = torch.Generator().manual_seed(seed)
    matrix = (torch.randn(shape, generator=generator) * 20).to(dtype)
    return matrix.masked_fill_(torch.rand(shape, generator=generator) < sparsity, 0)


def product(weight, x):
    """The product in fp64, and the sums of magnitudes that rounding is relative to."""
    return x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T


def _of_rows(weight, x, backend):
    expected, magnitude = product(weight, x)
    return expected, 4e-7 * max(4, weight.shape[1] ** 0.5) * magnitude


def fields_moved(matrix, move):
    """A dataclass with all its tensors moved."""
    stored = {field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)}
    return dataclasses.replace(matrix, **{k: move(v) for k, v in stored.items() if isinstance(v, torch.Tensor)})


def _parts(parts, move):
    """A tuple of tensors and outliers."""
    return tuple(move(part) if isinstance(part, torch.Tensor) else fields_moved(part, move) for part in parts)


def harmed_bitmap(found, generator):
    offsets, blocks, bits = found.row_offsets.clone(), found.block_offsets.clone(), found.bitmap.clone()
    inner = torch.randint(1, max(2, len(offsets) - 1), (2,), generator=generator)
    if len(offsets) > 2:
        offsets[inner] = torch.tensor(WILD)[torch.randint(len(WILD), (2,), generator=generator)]
    blocks[torch.randint(len(blocks), (1,), generator=generator)] = int(inner[0]) << 20
    bits[torch.randint(len(bits), (1,), generator=generator)] = 255  # more bits than there are values
    return dataclasses.replace(found, bitmap=bits, block_offsets=blocks, row_offsets=offsets)


def entries(shape, share, seed=0):
    """Rows, columns and values of random outliers; one row in three has none, one has all its columns."""
    generator = torch.Generator().manual_seed(seed)
    share = min(share, 4000 / max(1, shape[0] * shape[1]))
    kept = torch.rand(shape, generator=generator) < share
    kept[1::3] = False
    if shape[1] < 1000 and share:
        kept[2::7] = True
    rows, columns = kept.nonzero(as_tuple=True)
    values = torch.randn(len(rows), generator=generator).half()
    return rows, columns, torch.where(values == 0, 1, values)


def outliers(shape, share=0.1, storage="csr", seed=0):
    return csr.encode(storage, shape, *entries(shape, share, seed))


def _harmed_outliers(sound, generator):
    bits, case = torch.iinfo(sound.col_vals.dtype), int(torch.randint(32, (1,), generator=generator))
    offsets = torch.randint(-(2**31), 2**31, sound.offsets.shape, generator=generator).int() >> case
    count = 16 * (case % 5)
    offsets[0], offsets[-1] = 0, count
    words = torch.randint(bits.min, bits.max, (count,), generator=generator, dtype=sound.col_vals.dtype)
    return type(sound)(sound.shape, offsets, words)


def _judge_outliers(packed, x, backend):
    rows, columns, values = packed.entries()
    nothing, terms = torch.zeros(len(x), packed.shape[0]).double(), values.double() * x.double()[:, columns]
    return nothing.index_add(1, rows, terms), 1e-5 * nothing.index_add(1, rows, terms.abs())


def _add_to_zeros(packed, x, out, backend):
    out = torch.empty(*x.shape[:-1], packed.shape[0], device=x.device) if out is None else out
    given = x.clone() if out.data_ptr() == x.data_ptr() else x
    return csr.add_matvec(packed, given, out.zero_(), backend)


def codes(shape, seed=0):
    """Random codes and statistics of SpQR, such that weights are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    tall, wide = spqr.tiles(shape)
    found = [
        torch.randint(0, 8, size, generator=generator, dtype=torch.uint8)
        for size in (shape, (shape[0], wide), (shape[0], wide))
    ]
    second_order = torch.randn(tall, wide, 4, generator=generator) * torch.tensor([0.1, 0.5, 2, 1])
    return spqr.Codes(*found, second_order.half())


def wild(shape, seed=0):
    """The same with statistics of any finite bits: subnormals, numbers that overflow fp16, ties.

    In each second row of tiles, s = −code, so that a weight with q = z is −0.
    """
    given, generator = codes(shape, seed), torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 16, given.second_order.shape, generator=generator).to(torch.uint16)
    second_order = bits.view(torch.float16).nan_to_num(0.0, 1.0, -1.0)
    second_order[1::2] = torch.tensor([-1, 1, 0, 0])
    return spqr.Codes(given.weights, given.scales, given.zeros, second_order)


def decoded(words, packed):
    """The weights of SpQR's words and outliers, by the oracle."""
    weights = torch.from_numpy(_dequantised(words.numpy().tobytes(), packed.shape)).float()
    rows, columns, values = packed.entries()
    weights[rows, columns] += values.float()
    return weights


@functools.lru_cache(1000)
def _dequantised(words: bytes, shape):
    """By the slow oracle: once for all backends."""
    return naive_spqr.dequantise(np.frombuffer(words, np.uint64).tolist(), *shape)


def spqr_magnitude(words, packed, x):
    """Σ (|s q| + |s z| + |outlier|) |x|, to which the products' errors are relative."""
    found = spqr.unpack(words, packed.shape)
    parts = found.second_order.repeat_interleave(16, 0)[: packed.shape[0]].unbind(-1)
    scale_scale, zero_scale, scale_zero, zero_zero = parts
    scales = (scale_scale * (found.scales.half() - scale_zero)).double().abs()
    zeros = (zero_scale * (found.zeros.half() - zero_zero)).double().abs()
    each = [part.repeat_interleave(16, 1)[:, : packed.shape[1]] for part in (scales, zeros)]
    magnitude = each[0] * (found.weights + each[1])
    rows, columns, values = packed.entries()
    magnitude[rows, columns] += values.double().abs()
    return x.double().abs() @ magnitude.T


def rounded_activations(words, packed, x):
    """How far a product is off, at most, if each activation is off by half a step."""
    if not x.numel():
        return 0.0
    largest = functional.pad(x.abs(), (0, -x.shape[1] % 16)).view(len(x), -1, 16).amax(-1)
    return spqr_magnitude(words, packed, largest.repeat_interleave(16, -1)[:, : x.shape[1]]) / (2 * STEPS)


def judge_spqr(parts, x, backend):
    """Ways that decode first round each weight to fp16; the others do not."""
    words, packed = parts
    expected, magnitude = x.double() @ decoded(words, packed).double().T, spqr_magnitude(words, packed, x)
    if backend in EXACT:
        return expected, 1e-6 * magnitude
    unrounded = 2**-10 * magnitude + 2**-25 * x.abs().sum(1, keepdim=True, dtype=torch.float64)
    return expected, unrounded + (rounded_activations(words, packed, x) if backend.endswith("int16") else 0)


def _harmed_spqr(parts, generator):
    bits = torch.iinfo(torch.int64)
    words = torch.randint(bits.min, bits.max, parts[0].shape, generator=generator)
    return words, _harmed_outliers(parts[1], generator)


ORACLES = {
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x) ** 2,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def bundle(rows, hidden, parts, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([max(hidden, 1) ** -0.5] * (parts - 1) + [1.0]).repeat_interleave(hidden)
    return (torch.randn(rows, parts * hidden, generator=generator) * scale).to(dtype)


def ffn(bundles, x, activation, bias=None, threshold=0.0):
    """The FFN in double precision, one matrix after the other; and the sums of magnitudes that bound the error."""
    *given, down = bundles.double().split(x.shape[-1], dim=1)
    products = [x.double() @ part.T for part in given]
    if bias is not None:
        products[0] = products[0] + bias.double()
    values = ORACLES[activation](products[0])
    values = values * products[1] if len(products) == 2 else values
    values = torch.where(values.abs() <= threshold, 0, values)
    return values @ down, values.abs() @ down.abs() + x.double().abs().sum(-1, keepdim=True) * 1e-3


def records_of(rows, hidden, bits, seed=0):
    """Any codes, scale codes and zero codes; weights of about 1 / √hidden in gate and up, and 1 in down."""
    generator = torch.Generator().manual_seed(seed)
    records = torch.randint(0, 256, (rows, record_bytes(hidden, bits)), dtype=torch.uint8, generator=generator)
    nbytes, levels = section_bytes(hidden, bits), 2**bits - 1
    for part, size in enumerate((hidden**-0.5, hidden**-0.5, 1.0)):
        scale = 2 * size / levels
        head = torch.tensor([scale / 500, scale, levels / 1000, levels / 2.5], dtype=torch.float16)
        records[:, part * nbytes : part * nbytes + 8] = head.view(torch.uint8)
    records[:, SECTIONS * nbytes :] = 0
    return records


def ffn_of_records(records, x, bits, threshold=0.0):
    """`ffn` of the decoded weights."""
    return ffn(torch.cat(decode(records, x.shape[-1], bits), 1), x, "silu", threshold=threshold)


def _bitmap(dtype):
    def judge(found, x, backend):
        return _of_rows(bitmap.decompress(found, backend="portable"), x, backend)

    def dense(found, shape, seed):
        return sparse(shape, dtype, (0.5, 0.9, 0, 1)[seed % 4], seed)

    return Family(
        f"bitmap {str(dtype)[6:]}",
        bitmap,
        lambda shape, seed: bitmap.encode(dense(None, shape, seed)),
        lambda found, x, out, backend: bitmap.matvec(found, x, out, backend),
        judge,
        fields_moved,
        small=((3, 0), (1, 1), (9, 31), (1, 4104)),  # the last has a second block of columns
        large=((300, 9216), (1000, 1000), (7, 36_864), (3, 65_537), (70_000, 40)),
        alone=False,
        harmed=harmed_bitmap,
        decode=bitmap.decompress,
        dense=dense,
        dtypes=(dtype,),
    )


def harmed_codes(found, generator):
    offsets, lengths = found.row_offsets.clone(), found.lengths.clone()
    rows = torch.randint(len(offsets), (3,), generator=generator)
    offsets[rows] = torch.tensor(WILD)[torch.randint(len(WILD), (3,), generator=generator)]
    lengths[torch.randint(256, (9,), generator=generator)] = torch.tensor([0, 1, 1, 2, 11, 12, 99, 128, 255]).byte()
    coded = torch.randint(0, 256, found.coded.shape, generator=generator, dtype=torch.uint8)
    return dataclasses.replace(found, row_offsets=offsets, lengths=lengths, coded=coded[: 8 + int(rows[0])])


def _huffman(dtype):
    def judge(found, x, backend):
        return _of_rows(huffman.decode(found), x, backend)

    def dense(found, shape, seed):
        return sparse(shape, dtype, (0.1, 0.9, 0, 1)[seed % 4], seed)

    return Family(
        f"huffman {str(dtype)[6:]}",
        huffman,
        lambda shape, seed: huffman.encode(dense(None, shape, seed)),
        lambda found, x, out, backend: huffman.matvec(found, x, out, backend),
        judge,
        fields_moved,
        harmed=harmed_codes,
        decode=lambda found, out, backend: huffman.decode(found, out),
        dense=dense,
        dtypes=(dtype,),
    )


def _dense(dtype):
    def make(shape, seed):
        return (20 * random(*shape, seed=seed)).to(dtype)

    moved = lambda weight, move: move(weight)  # noqa: E731
    return Family(f"dense {str(dtype)[6:]}", dense, make, dense.matvec, _of_rows, moved)


def _spqr(storage):
    return Family(
        f"spqr {storage}",
        spqr,
        lambda shape, seed: (spqr.pack(codes(shape, seed)), outliers(shape, (0.1, 0, 1)[seed % 3], storage, seed)),
        lambda parts, x, out, backend: spqr.matvec(*parts, x, out, backend),
        judge_spqr,
        _parts,
        shapes=((0, 0), (0, 16), (3, 0), (1, 1), (16, 16), (17, 15), (40, 70), (31, 300)),
        small=((3, 0), (1, 1), (17, 20)),
        large=((16, 15), (300, 5000), (4096, 4096), (100, 40_000), (33, 70_000)),
        harmed=_harmed_spqr,
        decode=lambda parts, out, backend: spqr.decode(*parts, out, backend),
        dense=lambda parts, shape, seed: decoded(*parts),
        dtypes=(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    )


def _outliers(storage):
    return Family(
        f"outliers {storage}",
        csr,
        lambda shape, seed: outliers(shape, (0.3, 0, 1)[seed % 3], storage, seed),
        _add_to_zeros,
        _judge_outliers,
        fields_moved,
        shapes=((0, 0), (0, 16), (3, 0), (1, 1), (16, 16), (17, 40), (15, 100), (40, 33), (33, 70_000)),
        harmed=_harmed_outliers,
    )


def _neurons(dtype, activation, parts):
    def judge(bundles, x, backend):
        expected, bound = ffn(bundles, x, activation)
        return expected, 1e-5 * bound

    return Family(
        f"neurons {str(dtype)[6:]} {activation}",
        neurons,
        lambda shape, seed: bundle(*shape, parts, dtype, seed),
        lambda bundles, x, out, backend: neurons.ffn(bundles, x, activation, out=out, backend=backend),
        judge,
        lambda bundles, move: move(bundles),
        shapes=((0, 5), (1, 1), (3, 63), (7, 64), (40, 130), (33, 200)),
        small=((0, 5), (1, 1), (9, 36)),
        large=((33, 199), (3000, 4096)),
    )


def _records(bits):
    def judge(records, x, backend):
        expected, bound = ffn_of_records(records, x, bits)
        return expected, 2e-5 * bound

    return Family(
        f"records {bits}",
        neurons,
        lambda shape, seed: records_of(*shape, bits, seed),
        lambda records, x, out, backend: neurons.ffn(records, x, "silu", out=out, backend=backend, bits=bits),
        judge,
        lambda records, move: move(records),
        shapes=((0, 64), (1, 64), (3, 128), (7, 192), (9, 576), (40, 1088)),
        small=((0, 64), (1, 64), (5, 128)),
        large=((33, 576), (1408, 2048)),
        step=64,
        bits=bits,
    )


def _blocks(name):
    """Types whose blocks have 32 columns; `tests/formats/test_ggml.py` has all."""

    def judge(data, x, backend):
        if backend == "gguf":
            weight = torch.from_numpy(naive_blocks.decoded(name, data, (len(data), x.shape[1])))
            return _of_rows(weight, x, backend)
        return map(torch.from_numpy, naive_blocks.product(name, data, x.float().numpy()))

    def decode(data, out, backend):
        tensors_of_blocks.decode(name, data, out)
        return out

    return Family(
        f"blocks {name}",
        blocks,
        lambda shape, seed: random_blocks(name, *shape, seed).data,
        lambda data, x, out, backend: tensors_of_blocks.matvec(name, data, x, out, backend),
        judge,
        lambda data, move: move(data),
        shapes=((1, 32), (5, 64), (7, 96), (13, 992), (3, 4128)),
        step=32,
        harmed=lambda data, generator: torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8),
        decode=decode,
        dense=lambda data, shape, seed: torch.from_numpy(naive_blocks.decoded(name, data, shape)).float(),
        dtypes=(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    )


CASES = [  # of bundled neurons: type, activation, parts; compiled once each, and used by all tests
    (torch.float16, "relu", 2),
    (torch.float32, "silu", 3),
    (torch.bfloat16, "silu", 3),
]
FAMILIES = [
    *map(_bitmap, DTYPES),
    *map(_dense, DTYPES),
    *map(_huffman, (torch.bfloat16, torch.float32)),
    *map(_spqr, csr.STORAGES),
    *map(_outliers, csr.STORAGES),
    *(_neurons(*case) for case in CASES),
    *map(_records, (4, 2)),
    *map(_blocks, ("Q8_0", "Q4_1")),
]


def at_the_end_of_memory(tensor):
    """A copy whose last byte is the last of a page, followed by one that may not be touched."""
    if not tensor.numel():
        return tensor
    page = mmap.PAGESIZE
    pages = -(-tensor.nbytes // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages * page), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * page - tensor.nbytes)
    return copy.view(tensor.shape).copy_(tensor)


def ptx_of(kernel, cc, *arguments):
    """The PTX, made without a GPU, of a kernel for arrays, each given by its element and dimensions, and numbers."""
    from numba import cuda, types

    kinds = (
        types.Array(getattr(types, kind[0]), kind[1], "C") if isinstance(kind, tuple) else kind for kind in arguments
    )
    ptx, _ = cuda.compile_ptx(kernel.py_func, types.void(*kinds), cc=cc)
    assert f".target sm_{cc[0]}{cc[1]}" in ptx
    assert not re.search(r"\.local|\bcall\b", ptx), "arrays in memory that should be in registers, or calls"
    return ptx


def backends_here(table) -> list[str]:
    """The backends of a table that are tested here."""
    return [*table.for_gpus] if ON_GPU else table.available()


def each_backend(table):
    """The fixture `backend`: those of a table in turn. Backends that this CPU cannot run are left out."""
    return pytest.fixture(params=backends_here(table))(lambda request: request.param)


def each_with_one(backends, types) -> list[tuple]:
    """Pairs of a backend and a type: all types with the first backend, and each other backend with one of them.

    A backend has its loop and a type how its numbers are read, whatever the other is. So both have a test here, at a
    third of the cost: nearly all of it is to compile the pairs. The first backend is the one that a machine takes by
    itself, AVX-512, AVX2 or portable code. So machines of other kinds test other pairs.
    """
    types, firsts = [*types], backends[:1]
    others = [(backend, types[turn % len(types)]) for turn, backend in enumerate(backends[1:], 1) if types]
    return [(backend, kind) for backend in firsts for kind in types] + others
