"""ggml's own functions of a row, by their addresses: what llama.cpp multiplies, rounds and decodes with on a CPU.

The package `libggml-python` brings the library. `TOOLKIT_GGML` names another build: the file `libggml-cpu.so`, or the
folder that holds it beside `libggml-base.so`, such as llama-cpp-python's `llama_cpp/lib` or a system's.

C declarations (`ggml-cpu/quants.h`, `ggml-quants.h`), the same since 2024:

    void ggml_vec_dot_q4_K_q8_K(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by,
                                int nrc);
    void quantize_row_q8_K(const float *x, void *y, int64_t k);
    void dequantize_row_q4_K(const void *x, float *y, int64_t k);
"""

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from toolkit.errors import UserError
from toolkit.kernels.blocks.layout import ROUNDED
from toolkit.kernels.engine.simd import host_has
from toolkit.progress import tell_once

VARIABLE = "TOOLKIT_GGML"
PACKAGE = "libggml"
ENDS = (".so", ".dylib")
# what a build may have been compiled for, as ggml asks and as LLVM calls it
FEATURES = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "bmi2": "bmi2",
    "avx512": "avx512f",
    "avx512_vbmi": "avx512vbmi",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "avx_vnni": "avxvnni",
}


class Functions(NamedTuple):
    """Addresses of a type's functions: the product of a row with a rounded vector, and the row as fp32.

    `quantise` rounds a vector for the product, to blocks of the type `rounded`.
    """

    dot: int
    quantise: int
    rounded: str
    decode: int


class Library:
    """ggml, loaded from the file of its CPU part. Raises `UserError` for what is no such library for this CPU."""

    def __init__(self, file: Path):
        self.file = file
        try:
            self._base = ctypes.CDLL(str(file.with_name(file.name.replace("-cpu", "-base"))))
            self._cpu = ctypes.CDLL(str(file))
            asked = {name: getattr(self._cpu, f"ggml_cpu_has_{asked}", int) for asked, name in FEATURES.items()}
            if missing := [name for name, has in asked.items() if has() and not host_has(name)]:
                raise OSError(f"it is built for CPUs with {', '.join(missing)}")
            self._cpu.ggml_cpu_init()  # fills its table of fp16 numbers
        except (OSError, AttributeError) as error:
            raise UserError(f"{file} is no ggml for this CPU: {error}; {VARIABLE} names the build to use") from None

    def functions(self, name: str) -> Functions | None:
        """The functions of a block type by GGUF's name, or None if this build has none."""
        named = name.lower().replace("_k", "_K")
        decode = _address(self._base, f"dequantize_row_{named}")
        for rounded in ROUNDED:
            dot = _address(self._cpu, f"ggml_vec_dot_{named}_{rounded.lower().replace('_k', '_K')}")
            quantise = _address(self._cpu, f"quantize_row_{rounded.lower().replace('_k', '_K')}")
            if dot and quantise and decode:
                return Functions(dot, quantise, rounded, decode)
        return None


def _address(library: ctypes.CDLL, function: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, function), ctypes.c_void_p).value
    except AttributeError:
        return None


@cache
def library() -> Library | None:
    """The build to use; None, with one line, if there is none. Raises `UserError` for a build that cannot be used."""
    given = os.environ.get(VARIABLE)
    file = next(_cpu_parts(Path(given)) if given else _of_package(), None)
    if file is None and given:
        raise UserError(f"{VARIABLE}={given}: expected the file libggml-cpu.so, or the folder that holds it")
    if file is None:
        tell_once("products with GGUF blocks are slow, since ggml is missing: pip install libggml-python")
    return file and Library(file)


def _of_package() -> Iterator[Path]:
    package = find_spec(PACKAGE)
    for place in (package and package.submodule_search_locations) or ():
        for folder in Path(place).glob("lib*"):
            yield from _cpu_parts(folder)


def _cpu_parts(given: Path) -> Iterator[Path]:
    """The file itself, or the libraries of this name in a folder."""
    found = [given] if given.is_file() else [given / f"libggml-cpu{end}" for end in ENDS]
    return (file for file in found if file.is_file())


@cache
def functions(name: str) -> Functions | None:
    """The library's functions for a block type; None without a library or such a type."""
    found = library()
    return found and found.functions(name)
