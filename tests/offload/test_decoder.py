"""The decoder on NumPy arrays, against transformers' model with the same weights, and against the way with torch."""

import subprocess
import sys
from dataclasses import replace
from weakref import WeakSet

import numpy as np
import pytest
import torch

import toolkit
from tests.models.test_templates import TEMPLATES
from tests.offload.conftest import in_parts
from tests.offload.test_gguf_file import CASES, EXACT, difference, random_file, write
from toolkit.errors import UserError
from toolkit.models.file_tokenizer import FileTokenizer
from toolkit.models.gguf_header import read_header
from toolkit.models.gguf_tokenizer import read_kept_tokenizer, read_tokenizer
from toolkit.offload.budget import Budget
from toolkit.offload.cached_model import CachedModel
from toolkit.offload.chat_template import ends_of, tokens_of
from toolkit.offload.decoder import decoder as decoders
from toolkit.offload.decoder.architecture import architecture_of
from toolkit.offload.decoder.decoder import Decoder
from toolkit.offload.decoder.steps import TokenVectors
from toolkit.offload.generation import Request, Writer
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.offload.sampling import Sampling

TOKENS = [at * 37 % 128 for at in range(40)]
MUCH = 1 << 40


def opened(file, dram_bytes=MUCH, context=40, **options):
    header = read_header(file)
    return Decoder.open(header, architecture_of(header), Budget("DRAM", dram_bytes), context, **options)


def logits(decoder):
    """The logits after each token: of a prompt, of five more, and of one after the other."""
    found = [decoder.scores(TOKENS[:20]), decoder.scores(TOKENS[20:25])]
    found += [decoder.step(token)[None] for token in TOKENS[25:39]]
    return torch.from_numpy(np.concatenate([*found, decoder.prefill(TOKENS[39:])[None]]))


@pytest.mark.parametrize(("name", "kind"), [("llama", "Q4_K"), ("qwen2", "Q6_K"), ("qwen3", "Q5_0"), ("gemma3", "F16")])
def test_blocks_give_the_logits_of_the_way_with_torch(tmp_path, name, kind, monkeypatch):
    """From disk they are the same to the bit."""
    random_file(name, kind, file := tmp_path / "model.gguf")
    with OffloadedModel.open(file) as model:
        expected = in_parts(model.model, torch.tensor([TOKENS[:12]]), [1] * 12)[0]
    with opened(file) as decoder:
        found = torch.from_numpy(np.stack([decoder.step(token) for token in TOKENS[:12]]))
        assert difference(found[1:], expected[1:]) < 10 * EXACT
        decoder.cut(0)
        found, pieces = logits(decoder), len(decoder.tiers)
    for in_dram, options in ((0, {"policy": "sequential", "reader": "threads"}), (pieces // 2, {})):
        where = LayerMap(0, in_dram, pieces - in_dram, spread=True).tiers
        monkeypatch.setattr(decoders, "filled", lambda *arguments, where=where: where)
        with opened(file, **options) as decoder:
            assert torch.equal(logits(decoder), found)
            assert decoder.read_bytes > 0


@torch.no_grad()
def test_a_split_file_is_one_model(tmp_path):
    original = CASES["qwen2"].model()
    write(original, CASES["qwen2"], tmp_path / "model.gguf", pieces=9)
    first = sorted(tmp_path.glob("model-*.gguf"))[0]
    with opened(first) as decoder:
        assert len(decoder.file.files()) > 1
        assert difference(logits(decoder), original(torch.tensor([TOKENS])).logits[0]) < EXACT


def test_logits_have_the_same_bits_however_a_text_is_cut(tmp_path):
    random_file("qwen2", "Q4_K", file := tmp_path / "model.gguf")
    with opened(file) as decoder:
        check_cuts(decoder)


def check_cuts(decoder):
    """A text goes on from any place, and its tokens may come one by one."""
    once = decoder.scores(TOKENS[:13])
    for length in (12, 7, 3):
        decoder.cut(length)
        assert np.array_equal(decoder.prefill(TOKENS[length:13]), once[-1])
    decoder.cut(0)
    assert np.array_equal(np.stack([decoder.step(token) for token in TOKENS[:13]]), once)


def test_a_full_context_takes_no_token(tmp_path):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    with opened(file, context=12) as decoder:
        decoder.prefill(TOKENS[:12])
        with pytest.raises(UserError, match="13 tokens: expected 12 at most"):
            decoder.step(5)


def test_memory_holds_the_vectors_of_one_batch_of_a_prompt(tmp_path, monkeypatch):
    """The last batch may be smaller than the others, whose vectors are gone before its own are made."""
    of_prompts, held = WeakSet(), []

    def made(sizes, tokens):
        held.append(len(of_prompts))
        vectors = TokenVectors(sizes, tokens)
        if tokens > 1:
            of_prompts.add(vectors)
        return vectors

    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    monkeypatch.setattr(decoders, "TokenVectors", made)
    monkeypatch.setattr(decoders, "batch_tokens", lambda sizes: 8)
    with opened(file) as decoder:
        decoder.prefill(TOKENS[:20])  # 7, 7, 6
        decoder.prefill(TOKENS[20:33])  # 7, 6
        assert held == [0] * 6  # two of one token, four of several
        assert not of_prompts


def test_a_tensor_that_the_decoder_does_not_know_leaves_a_file_to_transformers(tmp_path):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    header = read_header(file)
    extra = {"blk.0.attn_q.bias": header.tensors["blk.0.attn_norm.weight"]}
    assert architecture_of(header) is not None
    assert architecture_of(replace(header, tensors={**header.tensors, **extra})) is None


def test_the_tokenizer_has_the_tokens_of_transformers(tmp_path):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    header = read_header(file)
    theirs, ours = read_tokenizer(header), read_kept_tokenizer(header)
    assert isinstance(ours, FileTokenizer)
    for text in ("a test", " ab  ba", "", "naïve\n"):
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours(text, add_special_tokens=special)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.added_tokens_decoder.keys() == theirs.added_tokens_decoder.keys()
    assert ours.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)


def test_a_conversation_has_the_tokens_of_transformers(tmp_path):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    header = read_header(file)
    theirs, ours = read_tokenizer(header), read_kept_tokenizer(header)
    theirs.chat_template = ours.chat_template = TEMPLATES[0]
    messages = [{"role": "user", "content": "a test"}, {"role": "assistant", "content": " ab"}]
    for answering in (True, False):
        assert tokens_of(ours, messages, answering) == tokens_of(theirs, messages, answering)
    theirs.chat_template = ours.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    assert ends_of(ours) == ends_of(theirs) == {theirs.eos_token_id}


@pytest.mark.parametrize(("name", "sampling"), [("llama", Sampling()), ("gemma3", Sampling(1.5, 40, 0.9, seed=3))])
def test_texts_are_those_of_the_way_with_torch(tmp_path, name, sampling):
    write(CASES[name].model(), CASES[name], file := tmp_path / "model.gguf")
    tokenizer, request = read_kept_tokenizer(read_header(file)), Request(sampling, most=20)

    def text(model, prompt):
        return [piece.token for piece in Writer(model, tokenizer, (), 64).continued(prompt, request)]

    with OffloadedModel.open(file) as model:
        expected = [text(CachedModel(model), TOKENS[:length]) for length in (1, 30)]
    with opened(file, context=64) as decoder:
        assert [text(decoder, TOKENS[:length]) for length in (1, 30)] == expected


def test_commands_and_python_import_no_torch(tmp_path):
    write(CASES["qwen2moe"].model(), CASES["qwen2moe"], file := tmp_path / "model.gguf")
    (prompts := tmp_path / "prompts").write_text("ab\nba\n")
    code = f"""if True:
        import io, sys, uvicorn
        import toolkit
        from toolkit.__main__ import main

        file, limit = {str(file)!r}, ["--memory", "800MB"]
        assert main(["run", file, "--prompt", "ab", "--max-new-tokens", "3", *limit]) == 0
        assert main(["run", file, "--prompts", {str(prompts)!r}, "--max-new-tokens", "3", "--json", *limit]) == 0
        draft = ["--draft", file, "--draft-tokens", "2"]
        assert main(["run", file, "--prompt", "ab", "--max-new-tokens", "7", *limit, *draft]) == 0
        sys.stdin = io.StringIO("ab\\nba")
        assert main(["chat", file, "--stop", "a", *limit]) == 0
        uvicorn.Server.run = lambda server, sockets: print("serving")
        assert main(["serve", file, "--port", "18099", *limit]) == 0
        with toolkit.open(file, memory="500MB") as model:
            print("text:", model.generate_text("ab", 3), model.generate_text("ab", 3, temperature=0.5))
        heavy = [name for name in ("torch", "transformers", "pandas", "scipy") if sys.modules.get(name)]
        assert not heavy, heavy
    """
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "peak" in done.stderr
    assert "a second" in done.stderr
    assert "draft: " in done.stderr
    assert "serving" in done.stdout


def test_perplexity_is_that_of_the_way_with_torch(tmp_path):
    write(CASES["qwen2"].model(), CASES["qwen2"], file := tmp_path / "model.gguf")
    text = torch.tensor(TOKENS)
    with OffloadedModel.open(file) as model, toolkit.open(file) as opened_file:
        expected = toolkit.perplexity(model, text, sequence_length=10)
        assert abs(toolkit.perplexity(opened_file, text, sequence_length=10) - expected) < 1e-3 * expected
        found = toolkit.perplexity(opened_file, TOKENS, sequence_length=10)
        assert found == toolkit.perplexity(opened_file, text.numpy(), sequence_length=10)
        assert "OpenedFile" in repr(opened_file)


def test_wrong_ids_and_a_closed_file_are_refused(tmp_path):
    """Ids that the model lacks would be read from what lies beside the embedding."""
    write(CASES["qwen2"].model(), CASES["qwen2"], file := tmp_path / "model.gguf")
    with toolkit.open(file) as opened_file:
        words = opened_file.decoder.words
        for wrong in (-1, words, 10**9):
            with pytest.raises(UserError, match=f"token id {wrong} is unknown to the model"):
                opened_file.scores([1, wrong])
        with pytest.raises(UserError, match="no token"):
            opened_file.scores([])
        with pytest.raises(UserError, match="unknown setting 'do_sample'"):
            opened_file.generate_text("ab", do_sample=True)
        with pytest.raises(UserError, match="prompt None: expected a text"):
            opened_file.generate_text(None)
    opened_file.close()
    for use in (lambda: opened_file.scores([1]), lambda: opened_file.generate_text("ab")):
        with pytest.raises(UserError, match="closed"):
            use()
