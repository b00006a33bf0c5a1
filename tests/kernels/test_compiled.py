"""Compiled kernels in files: another process finds them, and nothing but the very same kernel is ever found."""

import importlib.util
import itertools
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from numba.core.bytecode import FunctionIdentity

from toolkit.errors import UserError
from toolkit.kernels import bitmap, csr, dense, huffman, neurons, single_token, spqr
from toolkit.kernels.attention import prompt_attention
from toolkit.kernels.blocks import cpu_avx512, cpu_panels
from toolkit.kernels.engine import compiled, simd
from toolkit.kernels.engine.tensors import BITS, FLOAT_BITS

PACKAGE = "toolkit.kernels.toy"
SHARED = """
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

@numba.njit(inline="always")
def more(value):
    return value + 1

@numba.njit
def less(value):
    return value - 1

@intrinsic
def one(typing_context):
    return types.int64(), lambda context, builder, signature, values: ir.Constant(ir.IntType(64), 1)

@intrinsic
def two(typing_context):
    return types.int64(), lambda context, builder, signature, values: ir.Constant(ir.IntType(64), 2)
"""
KERNEL = """
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.toy.shared import less, more, one, two

@compiled
def scale(x):
    return 2 * more(x)

def closure(change, factor, number):
    @compiled
    def closure(x):
        return change(x) * factor + number()

    return closure

def other(change, factor, number):
    @compiled
    def closure(x):
        return -(change(x) * factor + number())

    return closure
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A kernel family in a folder of its own, an empty cache; the call imports it anew, as the next process would."""
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "kernels")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit of the same second and size would go unseen
    family = tmp_path / "kernels" / "toy"
    family.mkdir(parents=True)
    (family / "shared.py").write_text(SHARED)
    (family / "cpu.py").write_text(KERNEL)

    def start():
        monkeypatch.setattr(compiled, "AT_IMPORT", compiled.state())
        monkeypatch.setattr(compiled, "contents", cache(compiled.contents.__wrapped__))
        monkeypatch.setattr(compiled, "_folder", cache(compiled._folder.__wrapped__))
        for name in ("shared", "cpu"):
            spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", family / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, spec.name, module)
            spec.loader.exec_module(module)
        return module

    return start


def edit(tmp_path, old, new, file="shared.py"):
    path = tmp_path / "kernels" / "toy" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def entries(tmp_path):
    return sorted(file for file in (tmp_path / "cache").rglob("*-*") if file.is_file() and file.suffix != ".json")


def test_the_next_process_takes_what_was_compiled(toy, tmp_path):
    first = toy().scale
    assert [first(3), first(np.float32(0.5))] == [8, 3]
    again = toy().scale
    assert [again(3), again(np.float32(0.5))] == [8, 3]
    assert again(np.int8(3)) == 8
    assert len(entries(tmp_path)) == 3
    assert (compiled._folder().stat().st_mode & 0o777) == 0o700


def test_an_edit_of_any_source_is_seen(toy, tmp_path):
    """Numba's own cache would look at the file of `scale` only, and give the old result."""
    assert toy().scale(3) == 8
    edit(tmp_path, "value + 1", "value + 5")
    assert toy().scale(3) == 16
    edit(tmp_path, "value + 5", "value + 1")
    assert toy().scale(3) == 8
    (tmp_path / "kernels" / "toy" / "new.py").touch()
    compiled_anew = toy().scale
    assert compiled_anew(3) == 8
    assert len(entries(tmp_path)) == 3


@pytest.mark.parametrize("put_back", [False, True])
def test_files_that_changed_since_the_import_vouch_for_nothing(toy, tmp_path, put_back):
    """The process still runs the code that it imported: it must neither keep that under the new sources nor read."""
    old = toy().scale
    edit(tmp_path, "value + 1", "value + 5")
    if put_back:
        edit(tmp_path, "value + 5", "value + 1")
    assert old(3) == 8
    assert entries(tmp_path) == []
    assert toy().scale(3) == (8 if put_back else 16)


def test_closures_of_one_factory_are_told_apart(toy, tmp_path):
    def results(module):
        held = [
            (module.closure, module.more, 2, module.one),
            (module.closure, module.less, 2, module.one),  # another compiled function
            (module.closure, module.more, 3, module.one),  # another number
            (module.closure, module.more, 2.0, module.one),  # of another type
            (module.closure, module.more, True, module.one),
            (module.closure, module.more, 2, module.two),  # another intrinsic
            (module.other, module.more, 2, module.one),  # another function of the same name
        ]
        return [factory(*cells)(5) for factory, *cells in held]

    expected = [13, 9, 19, 13.0, 7, 14, -13]
    assert results(toy()) == expected
    assert len(entries(tmp_path)) == len(expected)
    times = [file.stat().st_mtime_ns for file in entries(tmp_path)]
    assert results(toy()) == expected
    assert [file.stat().st_mtime_ns for file in entries(tmp_path)] == times  # all were found


def test_a_closure_over_anything_else_is_not_kept(toy, tmp_path):
    module = toy()
    assert module.closure(module.more, np.int32(2), module.one)(5) == 13
    assert entries(tmp_path) == []


def test_a_damaged_file_is_compiled_anew(toy, tmp_path, caplog):
    assert toy().scale(3) == 8
    (file,) = entries(tmp_path)
    sound = file.read_bytes()
    flipped = bytes(byte ^ (place == len(sound) // 2) for place, byte in enumerate(sound))
    pickles = [compiled.signed(file, body) for body in (b"nonsense", pickle.dumps(("something",)))]
    for number, content in enumerate((flipped, sound[:100], b"", *pickles)):
        caplog.clear()
        file.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert toy().scale(3) == 8
        assert len(caplog.messages) == (number >= 3)
        assert file.read_bytes() != content, "replaced by a sound one"


def test_a_cache_that_cannot_be_written_costs_only_time(toy, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "file"))
    assert toy().scale(3) == 8
    assert "kernels are compiled anew in each process" in caplog.text
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    kernel = toy().scale
    compiled._folder().rename(tmp_path / "gone")
    assert kernel(3) == 8


def test_processes_may_compile_at_once(toy, tmp_path):
    """Each kernel is one file, which is replaced as a whole."""
    module = toy()

    def work():
        ok = [module.closure(module.more, factor, module.one)(5) for factor in range(4)] == [1, 7, 13, 19]
        os._exit(0 if ok else 1)

    workers = [multiprocessing.get_context("fork").Process(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 3
    assert len(entries(tmp_path)) == 4
    again = toy()
    assert [again.closure(again.more, factor, again.one)(5) for factor in range(4)] == [1, 7, 13, 19]


def kernels():
    """Kernels of every family that are closures, and those of modules."""
    for backend in bitmap.BACKENDS.values():
        yield from (backend.decompress(streaming) for streaming in (False, True))
        yield from (backend.product(dtype) for dtype in BITS)
        yield from (backend.decode_and_multiply(dtype) for dtype in BITS if backend.decode_and_multiply)
    for storage, bits in itertools.product(csr.STORAGES, (16, 32)):
        yield from (csr._rows(backend.product, storage, bits) for backend in csr.BACKENDS.values())
        for backend in spqr.BACKENDS.values():
            yield backend.product(storage, bits)
            forms = itertools.product(FLOAT_BITS, (False, True))
            yield from (backend.decode(storage, bits, dtype, ordered) for dtype, ordered in forms)
    for table, kinds in ((neurons.BACKENDS, FLOAT_BITS), (neurons.RECORD_BACKENDS, (2, 4))):
        yield from (backend.product(kind) for backend, kind in itertools.product(table.values(), kinds))
    yield from (function(dtype) for function in (single_token.attention, prompt_attention) for dtype in FLOAT_BITS)
    yield from (way.product(name) for way in (cpu_avx512, cpu_panels) for name in ("Q4_K", "Q8_0"))
    for table in (dense.BACKENDS, huffman.BACKENDS):
        yield from (backend.product(dtype) for backend in table.values() for dtype in BITS)
    by_width = (torch.float32, torch.bfloat16, torch.int8)  # fp16 has the kernels of bf16
    yield from (make(dtype) for make in (huffman.cpu.split, huffman.cpu.decode) for dtype in by_width)


def test_every_kernel_is_kept_under_a_name_of_its_own():
    distinct = {id(kernel): kernel for kernel in kernels()}.values()  # some backends share kernels
    names = [str(compiled.identity(kernel.py_func)) for kernel in distinct]
    assert len(set(names)) == len(names) > 60
    assert all(isinstance(kernel._cache, compiled.Files) for kernel in distinct)


def test_names_are_the_same_in_another_process():
    code = (
        "from toolkit.kernels import bitmap; from toolkit.kernels.engine.compiled import identity; import torch;"
        "print(identity(bitmap.BACKENDS['avx2'].decode_and_multiply(torch.float16).py_func))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(compiled.identity(bitmap.BACKENDS["avx2"].decode_and_multiply(torch.float16).py_func))


def test_functions_of_two_processes_have_two_names(toy):
    """Otherwise a closure that was loaded and one that is compiled afterwards could meet under one name in LLVM.

    Numba counts all others as it does.
    """
    counted, scale = FunctionIdentity._unique_ids, toy().scale
    assert [scale(3), scale(np.int8(3)), scale(np.float32(0.5))] == [8, 8, 3]
    numbers = [found.fndesc.uid for found in scale.overloads.values()]
    assert max(numbers) > 2**40
    assert len({second - first for first, second in itertools.pairwise(numbers)}) == 2
    assert FunctionIdentity._unique_ids is counted
    assert next(counted) < 2**40


def test_other_settings_are_another_folder(toy, monkeypatch):
    toy()
    first = compiled._folder()
    for name in ("BOUNDSCHECK", "CPU_FEATURES"):
        monkeypatch.setattr(compiled.config, name, "+avx")
        compiled._folder.cache_clear()
        assert compiled._folder() != first
    toy()


def test_kernels_without_a_compiler_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(compiled.config, "DISABLE_JIT", 1)
    spec = importlib.util.spec_from_file_location("again", compiled.__file__)
    with pytest.raises(UserError, match="NUMBA_DISABLE_JIT is set"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_instructions_that_numba_must_not_use_are_not_chosen(monkeypatch):
    """`NUMBA_CPU_NAME=generic` has no features. LLVM ends the process for code that needs one."""
    simd.host_has.cache_clear()
    monkeypatch.setattr(compiled.config, "CPU_FEATURES", "")
    assert bitmap.BACKENDS.available() == [name for name, it in bitmap.BACKENDS.items() if not it.features] != []
    simd.host_has.cache_clear()
