"""Kernels as object files that C can call, for any CPU: to read their assembly or to run them in an emulator.

    python -m toolkit.kernels.common.ahead bitmap decompress avx512 bfloat16 --cpu icelake-server -o decompress.o

`c_entry` in a family's `cpu_simd` gives the C function and says what it takes. The object needs nothing but the C
library: no Python, no Numba.
"""

import argparse
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

X86_64_V3 = "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+popcnt"
SKYLAKE = f"{X86_64_V3},+avx512f,+avx512bw,+avx512vl,+avx512dq"
# what the kernels use of each kind of CPU, by LLVM's names
CPUS = {"x86-64-v3": X86_64_V3, "skylake-avx512": SKYLAKE, "icelake-server": f"{SKYLAKE},+avx512vbmi2"}


def build(family: str, operation: str, backend: str, dtype: str, cpu: str, path: str | os.PathLike) -> Path:
    """Write an object file, and its assembly beside it, in a process of its own: Numba's target is set as it starts."""
    target = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": CPUS[cpu]}
    what = [family, operation, backend, dtype]
    command = [sys.executable, "-P", "-m", __spec__.name, *what, "--cpu", cpu, "-o", str(path)]
    subprocess.run(command, env=os.environ | target, check=True)
    return Path(path)


def llvm_ir(family: str, operation: str, backend: str, dtype: str) -> str:
    """The module, for the CPU that this process makes code for, with the entry named after the operation."""
    import numba
    import torch

    chosen = import_module(f"toolkit.kernels.{family}").BACKENDS[backend]
    c_entry = import_module(f"toolkit.kernels.{family}.cpu_simd").c_entry
    entry, arguments = c_entry(operation, chosen, getattr(torch, dtype))
    compiled = numba.cfunc(numba.types.void(*arguments))(entry)
    return _without_python(compiled.inspect_llvm().replace(f"@{compiled.native_name}(", f"@{operation}("))


def _without_python(module: str) -> str:
    """Numba's wrapper would report a Python error; these kernels raise none, so that path may lead nowhere."""
    declared = re.compile(r"^declare (.+?) @(?!llvm\.)(\w+)\((.*?)\).*$", re.MULTILINE)
    module = declared.sub(r"define internal \1 @\2(\3) { unreachable }", module)
    return module.replace("= external global i8", "= internal global i8 0")


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m toolkit.kernels.common.ahead", description=__doc__.splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("operation")
    parser.add_argument("backend")
    parser.add_argument("dtype", choices=["float32", "float16", "bfloat16", "int8"])
    parser.add_argument("--cpu", choices=CPUS, default="icelake-server")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    chosen = (options.family, options.operation, options.backend, options.dtype)
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
