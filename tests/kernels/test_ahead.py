"""Kernels compiled ahead of time: the right instructions for other CPUs, and right results when C calls them here."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from toolkit.kernels import bitmap
from toolkit.kernels.common import ahead
from toolkit.kernels.common.simd import host_has


@pytest.mark.parametrize(
    ("operation", "backend", "dtype", "cpu", "expand", "use"),
    [
        ("decompress", "avx512", "bfloat16", "icelake-server", "vpexpandw", "vmovdq[au]|vmovups"),
        ("matvec", "avx512", "float16", "icelake-server", "vpexpandw", "vcvtph2ps"),
        ("matvec", "avx512_widening", "int8", "skylake-avx512", "vpexpandd", "vpmovzxbd"),
    ],
)
def test_avx512_code_expands_in_registers(tmp_path, operation, backend, dtype, cpu, expand, use):
    path = ahead.build("bitmap", operation, backend, dtype, cpu, tmp_path / "kernel.o")
    assert path.read_bytes()[:4] == b"\x7fELF"
    lines = path.with_suffix(".s").read_text().splitlines()
    expanding = [line for line in lines if re.search(rf"\t({expand})\t", line)]
    assert expanding
    assert not any("(" in line for line in expanding), "the form that reads memory is slow on AMD"
    assert any(re.search(use, line) and "zmm" in line for line in lines)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to link with")
@pytest.mark.skipif(not host_has("avx2"), reason="made for x86-64-v3, which this CPU is not")
def test_c_can_call_them(tmp_path):
    matrix = torch.randn(6, 100, generator=torch.Generator().manual_seed(0)).half()
    encoded = bitmap.encode(matrix.masked_fill(matrix.abs() < 0.6, 0))
    x, y = torch.ones(100), torch.empty(6)
    dense = torch.empty(6, 100, dtype=torch.float16)
    for operation, outputs in (("decompress", [dense]), ("matvec", [x, y])):
        built = ahead.build("bitmap", operation, "avx2", "float16", "x86-64-v3", tmp_path / f"{operation}.o")
        library = tmp_path / f"{operation}.so"
        link = ["cc", "-shared", "-Wl,--no-undefined", "-o", library, built]
        subprocess.run(link, check=True, capture_output=True)
        tensors = [encoded.bitmap, encoded.row_offsets, encoded.values, *outputs]
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        getattr(ctypes.CDLL(str(library)), operation)(*pointers, ctypes.c_int64(6), ctypes.c_int64(100))
    assert torch.equal(dense, bitmap.decompress(encoded))
    assert torch.allclose(y, bitmap.matvec(encoded, x))
