"""`run` with a GGUF file: its text, what it says, and what it refuses."""

import sys

import pytest

from toolkit import paths
from toolkit.__main__ import main

sys.path.append(str(paths.root() / "benchmarks"))  # as the scripts there find their helpers
from gguf_files import CASES, write

PROMPT = "the he"


def run(file, *more):
    return main(["run", str(file), "--prompt", PROMPT, "--max-new-tokens", "6", *more])


@pytest.mark.parametrize(("name", "words"), [("llama", "0 on disk"), ("qwen3moe", "of those needed were there")])
def test_it_prints_a_text_and_what_memory_holds(tmp_path, capfd, name, words):
    write(CASES[name].model(), CASES[name], file := tmp_path / "model.gguf")
    assert run(file, "--dram", "40MB") == 0
    printed = capfd.readouterr()
    assert printed.out.startswith(PROMPT)
    assert "6 tokens in" in printed.err
    assert words in printed.err


def test_a_file_drafts_for_another(tmp_path, capfd):
    """One of the same vocabulary, with other layers."""
    for name in ("llama", "qwen3"):
        write(CASES[name].model(), CASES[name], tmp_path / f"{name}.gguf")
    assert run(tmp_path / "llama.gguf") == 0
    expected = capfd.readouterr().out
    assert run(tmp_path / "llama.gguf", "--draft", str(tmp_path / "qwen3.gguf")) == 0
    printed = capfd.readouterr()
    assert printed.out == expected
    assert "tokens a pass" in printed.err


REFUSED = [
    (("--format", "endor"), "is a file, which is run as it is; leave it out"),
    (("--neurons", "held"), "whose blocks the CPU reads and multiplies"),
    (("--dram", "1KB"), "DRAM"),
]


@pytest.mark.parametrize(("more", "words"), REFUSED)
def test_what_a_file_does_not_have_is_refused(tmp_path, capfd, more, words):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    assert run(file, *more) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error


def test_options_of_layers_are_refused_for_a_mixture(tmp_path, capfd):
    write(CASES["qwen3moe"].model(), CASES["qwen3moe"], file := tmp_path / "model.gguf")
    assert run(file, "--weights", "decoded") == 2
    assert "holds experts, which the CPU reads and uses" in capfd.readouterr().err
    assert run(file, "--residency", "lfu") == 0
    assert "of the experts" in capfd.readouterr().err


@pytest.mark.parametrize("contents", [b"", b"text", b"GGUF\x03\x00\x00\x00"])
def test_another_file_is_one_line(tmp_path, capfd, contents):
    (tmp_path / "model.gguf").write_bytes(contents)
    assert run(tmp_path / "model.gguf") == 2
    assert "cannot be read as a GGUF file" in capfd.readouterr().err.splitlines()[-1]
