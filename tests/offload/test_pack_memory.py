"""`pack` says how much memory it needs, and refuses a limit that is too small, before it begins."""

import torch
import transformers

from tests.families import load_family
from toolkit import memory_limits
from toolkit.__main__ import main
from toolkit.commands.pack_memory import needed_bytes
from toolkit.models.skeleton import outline
from toolkit.offload.logit_check import PROMPT, REST
from toolkit.offload.overhead import Overhead, TextRoom


def llama(hidden: int, neurons: int, layers: int, words: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=neurons, num_hidden_layers=layers, vocab_size=words, dtype=torch.bfloat16
    )
    return outline(config)


def test_the_memory_of_llama_2_7b_is_that_of_its_parts():
    model, windows, length = llama(4096, 11008, 32, 32000), 16, 1024
    block, present = 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096), 400_000_000
    hidden, matrices = windows * length * 4096 * 2, 4.5 * 4 * 4096 * 11008
    process = present + Overhead.of(model.config, TextRoom(PROMPT, REST), compiles=True).nbytes
    expected = process + 1.5 * block + hidden + matrices
    assert needed_bytes(model, windows, length, False, present) == round(expected)
    grams = 4 * (3 * 4096**2 + 11008**2)  # inputs of attention, of its output, of gate and up; of down
    factor = 4 * 11008**2
    assert needed_bytes(model, windows, length, True, present) == round(expected + grams + factor)


def test_too_little_memory_is_refused_with_the_least_that_works(tmp_path, monkeypatch, capsys):
    load_family("Qwen2", tmp_path / "model", torch.bfloat16)
    command = [
        "pack",
        str(tmp_path / "model"),
        "--method",
        "magnitude",
        "--no-evaluate",
        "--out",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(memory_limits, "anonymous_bytes", lambda *_: 400_000_000)
    for limit in ("300MB", "0.6GB"):
        assert main([*command, "--memory", limit]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"--memory {limit}: magnitude needs 0.63 GB; fewer --windows" in last
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert main([*command, "--memory", "0.63GB"]) == 0
    captured = capsys.readouterr()
    assert "takes up to 0.6 GB of memory, and 0.0 GB of disk" in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert "logits not compared: " in captured.out  # what is left of the limit would not hold the folder
    monkeypatch.setattr("toolkit.commands.run.generate_timed", lambda options, _: limits.append(options.memory))
    limits: list[str] = []
    assert main([*command[:-1], str(tmp_path / "more"), "--memory", "1.2GB"]) == 0
    assert "logits within " in capsys.readouterr().out
    assert limits == ["1.2GB"]  # the token that `run` makes keeps to it, too
