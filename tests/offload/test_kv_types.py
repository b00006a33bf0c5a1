"""The types of the key-value cache: 8 bits against an oracle that rounds by the package gguf, and what they take."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf_files import CASES, write

import toolkit
from tests.naive_cache import RoundedCache
from tests.offload.conftest import in_parts
from tests.offload.test_decoder import MUCH, TOKENS, check_cuts
from tests.offload.test_gguf_file import WIDE, difference
from tests.refusals import refused_command
from toolkit.__main__ import main
from toolkit.errors import UserError
from toolkit.kernels.engine import compiled
from toolkit.models.gguf_header import read_header
from toolkit.offload.budget import Budget
from toolkit.offload.decoder.architecture import architecture_of
from toolkit.offload.decoder.decoder import Decoder, overhead
from toolkit.offload.overhead import TextRoom
from toolkit.offload.variant import KV_TYPES

ROUNDED = 0.05  # of the logits' standard deviation
MODELS = ("llama", "qwen2", "qwen3", "gemma3", "gpt-oss")  # gemma3 has windows, gpt-oss sinks


def wide_file(name, file):
    """A small model whose heads are whole blocks, in a file."""
    fields = CASES[name].fields
    wide = {key: 256 for key in fields if key.endswith("intermediate_size")}
    wide |= {key: WIDE["head_dim"] for key in fields if key == "query_pre_attn_scalar"}  # no file has it
    case = replace(CASES[name], fields=dict(fields) | WIDE | wide)
    model = case.model()
    write(model, case, file)
    return model


def opened(file, kv_type, context=40, dram_bytes=MUCH):
    header = read_header(file)
    sizes = architecture_of(header).with_cache(kv_type)
    return Decoder.open(header, sizes, Budget("DRAM", dram_bytes), context)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_cache_that_the_package_rounds(tmp_path, name):
    """A prompt at once, a few tokens, and one after the other; greedy tokens are the same.

    The last digits of a key differ, so that now and then one is rounded to the next code.
    """
    model = wide_file(name, file := tmp_path / "model.gguf")
    cache, tokens = RoundedCache(config=model.config), torch.tensor([TOKENS])
    parts = (33, 3, *[1] * 4)
    expected, plain = in_parts(model, tokens, parts, cache)[0], model(tokens).logits[0]
    with opened(file, "q8_0") as decoder:
        found = torch.from_numpy(np.concatenate([decoder.scores(part[0].tolist()) for part in tokens.split(parts, 1)]))
    assert 5 * difference(found, expected) < difference(found, plain) < ROUNDED
    assert torch.equal(found.argmax(1), expected.argmax(1))


def test_bits_are_the_same_however_a_text_is_cut(tmp_path):
    wide_file("qwen2", file := tmp_path / "model.gguf")
    with opened(file, "q8_0") as decoder:
        check_cuts(decoder)


def test_memory_counted_is_memory_allocated(tmp_path):
    wide_file("qwen2", file := tmp_path / "model.gguf")
    nbytes = {}
    for kv_type in KV_TYPES:
        with opened(file, kv_type, context=100) as decoder:
            sizes, cache = decoder.sizes, decoder.cache
            nbytes[kv_type] = cache.keys.nbytes + cache.values.nbytes
        assert nbytes[kv_type] == sizes.cache_bytes(100) == overhead(sizes, TextRoom(60, 40), False).cache
    assert nbytes["f32"] == 2 * nbytes["bf16"]
    assert nbytes["q8_0"] * 32 * 2 == nbytes["bf16"] * 34


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_python_opens_a_file_with_each_type(tmp_path, kv_type):
    wide_file("llama", file := tmp_path / "model.gguf")
    with toolkit.open(file, memory="500MB", kv_type=kv_type) as model:
        assert model.decoder.sizes.dtype == KV_TYPES[kv_type]
        assert model.generate_text("ab", 5)


def test_the_command_runs_a_file_alone_and_with_a_draft(tmp_path, capfd):
    wide_file("qwen2", file := tmp_path / "model.gguf")
    command = ["run", str(file), "--prompt", "the he", "--max-new-tokens", "6", "--kv-type"]
    assert main([*command, "q8_0", "--memory", "9GB", "--context", "64"]) == 0
    assert "6 tokens in" in capfd.readouterr().err
    assert main([*command, "q8_0", "--draft", str(file)]) == 0
    assert "tokens a pass" in capfd.readouterr().err


def test_a_conversation_and_a_server_have_each_type(tmp_path, capfd, monkeypatch):
    wide_file("qwen2", file := tmp_path / "model.gguf")
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\nba\n"))
    assert main(["chat", str(file), "--kv-type", "q8_0"]) == 0
    assert "tokens of context" in capfd.readouterr().err
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)
    assert main(["serve", str(file), "--port", "18098", "--kv-type", "q8_0"]) == 0
    assert "is at http" in capfd.readouterr().err


def test_the_least_limit_of_a_process_knows_the_type(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(compiled, "ran_before", lambda kernels: True)  # else the first one counts the compiler
    wide_file("qwen2", file := tmp_path / "model.gguf")
    least = {}
    for kv_type in ("bf16", "q8_0"):
        context = ["--context", "100000", "--memory", "10MB", "--kv-type", kv_type]
        assert main(["run", str(file), "--prompt", "the he", "--max-new-tokens", "6", *context]) == 2
        least[kv_type] = int(re.search(r"too small: (\d+) MB are needed", capfd.readouterr().err)[1])
    sizes = architecture_of(read_header(file))
    less = sizes.with_cache("bf16").cache_bytes(100_000) - sizes.with_cache("q8_0").cache_bytes(100_000)
    assert abs(least["bf16"] - least["q8_0"] - less / 1e6) < 0.1 * less / 1e6


def test_what_cannot_have_the_type_is_refused(tmp_path, capfd):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    command = ["run", str(file), "--prompt", "the he", "--kv-type"]
    refused_command([*command, "q8_0"], "heads have 16 elements, and blocks 32: take f32 or bf16", capfd)
    refused_command([*command, "bf16", "--weights", "decoded"], "runs by transformers here, whose cache", capfd)
    with pytest.raises(UserError, match="runs by transformers"):
        toolkit.open(file, weights="decoded", kv_type="bf16")
    with pytest.raises(UserError, match="unknown type of keys and values 'q4_0'"):
        toolkit.open(file, kv_type="q4_0")
