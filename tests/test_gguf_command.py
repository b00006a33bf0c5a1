"""`run` with a GGUF file: its text, what it says, and what it refuses."""

import pytest
from gguf_files import CASES, write

from tests.refusals import refused_command
from toolkit.__main__ import main

PROMPT = "the he"


def command(file, *more):
    return ["run", str(file), "--prompt", PROMPT, "--max-new-tokens", "6", *more]


def run(*given):
    return main(command(*given))


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


def test_what_a_file_does_not_have_is_refused(tmp_path, capfd):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    refused_command(command(file, "--format", "endor"), "is a file, which is run as it is; leave it out", capfd)
    refused_command(command(file, "--residency", "lfu"), "holds no experts; leave it out", capfd)


def test_options_of_layers_are_refused_for_a_mixture(tmp_path, capfd):
    write(CASES["qwen3moe"].model(), CASES["qwen3moe"], file := tmp_path / "model.gguf")
    refused_command(command(file, "--weights", "decoded"), "holds experts, which the CPU reads and uses", capfd)
    assert run(file, "--residency", "lfu") == 0
    assert "of the experts" in capfd.readouterr().err
