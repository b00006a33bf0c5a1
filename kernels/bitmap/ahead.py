"""The bitmap kernels as object files that C can call, for any CPU: to read their assembly or run them in an emulator.

    python -m toolkit.kernels.bitmap.ahead decompress avx512 bfloat16 --cpu icelake-server -o decompress.o

    void decompress(const uint32_t *bitmap, const int64_t *offsets, const T *values,
                    T *dense, int64_t rows, int64_t columns);
    void matvec(const uint32_t *bitmap, const int64_t *offsets, const T *values,
                const float *x, float *y, int64_t rows, int64_t columns);

T is an unsigned integer of the elements' width. The object needs nothing but the C library: no Python, no Numba.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

# what the kernels use of each kind of CPU, by LLVM's names
CPUS = {
    "x86-64-v3": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+popcnt",
    "icelake-server": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+popcnt,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vbmi2",
}


def build(operation: str, backend: str, dtype: str, cpu: str, path: str | os.PathLike) -> Path:
    """Write an object file, and its assembly beside it, in a process of its own: Numba's target is set as it starts."""
    target = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": CPUS[cpu]}
    command = [sys.executable, "-m", __spec__.name, operation, backend, dtype, "--cpu", cpu, "-o", str(path)]
    subprocess.run(command, env=os.environ | target, check=True)
    return Path(path)


def llvm_ir(operation: str, backend: str, dtype: str) -> str:
    """The module, for the CPU that this process makes code for, with the entry named after the operation."""
    import numba
    import torch
    from numba import types

    from toolkit.kernels.bitmap import BACKENDS, WORD

    element = {1: types.uint8, 2: types.uint16, 4: types.uint32}[getattr(torch, dtype).itemsize]
    inputs = [types.CPointer(kind) for kind in (types.uint32, types.int64, element)]

    def decompress(bitmap, offsets, values, dense, rows, columns):
        offsets = numba.carray(offsets, (rows + 1,))
        words = numba.carray(bitmap, (rows, (columns + WORD - 1) // WORD))
        kernel(words, offsets, numba.carray(values, (offsets[rows],)), numba.carray(dense, (rows, columns)), 0, rows)

    def matvec(bitmap, offsets, values, x, y, rows, columns):
        offsets = numba.carray(offsets, (rows + 1,))
        words = numba.carray(bitmap, (rows, (columns + WORD - 1) // WORD))
        values = numba.carray(values, (offsets[rows],))
        kernel(words, offsets, values, numba.carray(x, (columns,)), numba.carray(y, (rows,)), 0, rows)

    chosen, sizes = BACKENDS[backend], [types.int64] * 2
    if operation == "decompress":
        kernel, entry, outputs = chosen.decompress(False), decompress, [types.CPointer(element)]
    else:
        kernel, entry, outputs = chosen.matvec(getattr(torch, dtype)), matvec, [types.CPointer(types.float32)] * 2
    compiled = numba.cfunc(types.void(*inputs, *outputs, *sizes))(entry)
    return _without_python(compiled.inspect_llvm().replace(f"@{compiled.native_name}(", f"@{operation}("))


def _without_python(module: str) -> str:
    """Numba's wrapper would report a Python error; these kernels raise none, so that path may lead nowhere."""
    declared = re.compile(r"^declare (.+?) @(?!llvm\.)(\w+)\((.*?)\).*$", re.MULTILINE)
    module = declared.sub(r"define internal \1 @\2(\3) { unreachable }", module)
    return module.replace("= external global i8", "= internal global i8 0")


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m toolkit.kernels.bitmap.ahead", description=__doc__.splitlines()[0])
    parser.add_argument("operation", choices=["decompress", "matvec"])
    parser.add_argument("backend", choices=["avx512", "avx2", "portable"])
    parser.add_argument("dtype", choices=["float32", "float16", "bfloat16", "int8"])
    parser.add_argument("--cpu", choices=CPUS, default="icelake-server")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    chosen = (options.operation, options.backend, options.dtype)
    if os.environ.get("NUMBA_CPU_NAME") != options.cpu:
        build(*chosen, options.cpu, options.output)
        return
    from llvmlite import binding

    module = binding.parse_assembly(llvm_ir(*chosen))
    target = binding.Target.from_triple(binding.get_process_triple())
    machine = target.create_target_machine(cpu=options.cpu, features=CPUS[options.cpu], opt=3, reloc="pic")
    options.output.write_bytes(machine.emit_object(module))
    options.output.with_suffix(".s").write_text(machine.emit_assembly(module))


if __name__ == "__main__":
    _main()
