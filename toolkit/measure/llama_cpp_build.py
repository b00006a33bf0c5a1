"""llama.cpp compiled for the CPU of this machine, from the source that the package llama-cpp-python brings.

    python -m toolkit.measure.llama_cpp_build     # once a machine and version; `nice` in front of it spares other work

Wheels of llama.cpp are compiled for any CPU with AVX2; its own users compile it. On two cores of an AMD EPYC (Zen 5) a
prompt then takes half of the CPU time, and a token the same, since memory limits it (docs/related.md). The environment
lies under `data/cache/environments/`, and from then on it is the llama.cpp that is measured
(`toolkit.measure.llama_cpp`). It takes a C++ compiler, 0.4 GB of disk while it is compiled, and ten to thirty
minutes on two cores. CMAKE_BUILD_PARALLEL_LEVEL is the number of files that are compiled at once.
"""

import collections
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.cache import at_hand, cached
from toolkit.errors import UserError, run_command
from toolkit.kernels.engine.simd import host_has
from toolkit.measure.child import PIP, WHEELS, run_installer
from toolkit.progress import progress, tell

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
DECLARATIONS = "typing_extensions>=4.5"  # the only package that its declarations of C functions import
COMPILERS = ("c++", "g++", "clang++")
# what ggml can be compiled to use, and the features that a CPU needs for it (LLVM's names)
INSTRUCTIONS = {
    "SSE42": ("sse4.2",),
    "AVX": ("avx",),
    "AVX2": ("avx2",),
    "BMI2": ("bmi2",),
    "FMA": ("fma",),
    "F16C": ("f16c",),
    "AVX_VNNI": ("avxvnni",),
    "AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "AVX512_VBMI": ("avx512vbmi",),
    "AVX512_VNNI": ("avx512vnni",),
    "AVX512_BF16": ("avx512bf16",),
}
OPTIONS = ("-DLLAVA_BUILD=OFF", "-DLLAMA_OPENSSL=OFF")  # no images, no downloads
STEP = re.compile(r"\[ *(\d+)(?:/(\d+)|%)\]")  # Ninja counts steps, make gives percent
LAST_LINES = 5


def flags() -> list[str]:
    """CMake's flags for this CPU.

    On x86-64 GGML_NATIVE stays off: it adds the matrix unit AMX, with which this version crashes at the first token.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["-DGGML_NATIVE=ON", *OPTIONS]
    has = {name: all(map(host_has, needed)) for name, needed in INSTRUCTIONS.items()}
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}={'ON' if on else 'OFF'}" for name, on in has.items()), *OPTIONS]


def built() -> Path | None:
    """The interpreter of the environment that has it, if it was built for this CPU; nothing is built."""
    folder = at_hand("environments", _key(), ())
    return folder / "bin" / "python" if folder else None


def build() -> Path:
    """The interpreter of the environment that has it, which is built first if need be.

    Raises `UserError` without a compiler, or with the compiler's last lines if it fails.
    """
    return cached("environments", _key(), (), _build) / "bin" / "python"


def _key() -> dict:
    return {"package": PACKAGE, "version": VERSION, "flags": flags()}


def _build(folder: Path) -> None:
    if not (os.environ.get("CXX") or any(map(shutil.which, COMPILERS))):
        names = ", ".join(COMPILERS)
        raise UserError(f"llama.cpp cannot be built: no C++ compiler ({names}) is on the PATH; install g++, or set CXX")
    python, begun_s = folder / "bin" / "python", time.perf_counter()
    run_installer("llama.cpp", [sys.executable, "-m", "venv", folder])
    run_installer("llama.cpp", [python, *PIP, *WHEELS, DECLARATIONS])
    source = ("-v", "--no-deps", "--no-compile", "--no-cache-dir", "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}")
    compile_package([python, *PIP, *source], os.environ | {"CMAKE_ARGS": " ".join(flags())})
    tell(f"llama.cpp ({PACKAGE} {VERSION}) was built in {(time.perf_counter() - begun_s) / 60:.0f} minutes")


def compile_package(command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
    """Run a command that compiles, with a bar of its steps. Raises `UserError` with its last lines if it fails."""
    last = collections.deque[str](maxlen=LAST_LINES)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with (
        subprocess.Popen(command, env=environment, text=True, errors="replace", **pipes) as process,
        progress("building llama.cpp", 100, "percent") as bar,
    ):
        for line in process.stdout:
            last.append(line.strip())
            if step := STEP.search(line):
                bar.update(100 * int(step[1]) // int(step[2] or 100) - bar.n)
    if process.returncode:
        raise UserError(f"llama.cpp cannot be built: {' / '.join(last) or 'it says nothing'}")


def main() -> int:
    """Build it, and say where it is."""

    def run() -> None:
        tell(f"llama.cpp ({PACKAGE} {VERSION}) with {' '.join(flags())}; it takes ten to thirty minutes on two cores")
        print(build().parents[1])

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
