import sys

import pytest

from toolkit.errors import UserError
from toolkit.measure import llama_cpp, llama_cpp_build


def test_flags_are_those_that_the_cpu_has(monkeypatch):
    has = {"avx2", "fma", "avx512f", "avx512cd", "avx512vl", "avx512dq"}  # AVX-512 without bytes and words
    monkeypatch.setattr(llama_cpp_build, "host_has", has.__contains__)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    flags = llama_cpp_build.flags()
    assert [flag for flag in flags if flag.endswith("ON")] == ["-DGGML_AVX2=ON", "-DGGML_FMA=ON"]
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX512=OFF", "-DGGML_AVX512_VNNI=OFF"} <= set(flags)
    has.add("avx512bw")
    assert "-DGGML_AVX512=ON" in llama_cpp_build.flags()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "-DGGML_NATIVE=ON" in llama_cpp_build.flags()


def test_it_is_built_once_and_then_the_one_that_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(llama_cpp_build, "run_installer", lambda name, command: None)
    commands = []

    def compiled(command, environment):
        commands.append(environment["CMAKE_ARGS"])
        (folder := command[0].parent).mkdir(parents=True)
        (folder / "python").touch()

    monkeypatch.setattr(llama_cpp_build, "compile_package", compiled)
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(llama_cpp, "_wheel", lambda: "the wheel")
    assert llama_cpp_build.built() is None
    assert llama_cpp.interpreter() == "the wheel"
    assert "generic AVX2" in llama_cpp.which()
    python = llama_cpp_build.build()
    assert llama_cpp.interpreter() == llama_cpp_build.build() == python
    assert "built for this CPU" in llama_cpp.which()
    assert commands == [" ".join(llama_cpp_build.flags())]
    python.unlink()  # a build with a missing file is none
    assert llama_cpp_build.built() is None


def test_the_compiler_s_last_lines_are_told(capfd):
    script = "for n in range(1, 9): print(f'  [{n}/8] Building x.cpp')\nprint('fatal: no space'); raise SystemExit(1)"
    with pytest.raises(UserError, match=r"cannot be built: .*\[8/8\] Building x.cpp / fatal: no space$"):
        llama_cpp_build.compile_package([sys.executable, "-c", script], {})
