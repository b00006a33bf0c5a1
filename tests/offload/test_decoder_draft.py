"""Drafts on NumPy arrays: the text is that of the model alone, to the token."""

from dataclasses import replace

import numpy as np
import pytest

from tests.offload.test_decoder import MUCH, TOKENS, opened
from tests.offload.test_gguf_file import CASES, random_file, write
from toolkit.errors import UserError
from toolkit.models.gguf_header import read_header
from toolkit.models.gguf_tokenizer import read_kept_tokenizer
from toolkit.offload.decoder.drafted_file import DraftedFile
from toolkit.offload.decoder.model_file import ModelFile
from toolkit.offload.generation import Request, Writer
from toolkit.offload.overhead import TextRoom
from toolkit.offload.sampling import Sampling
from toolkit.offload.speculation import MOST_DRAFTED, Drafted


@pytest.fixture
def small_pages(monkeypatch):
    """Buffers are whole pages of 4 KiB, so that budgets of small files make a difference."""
    for place in ("storage.buffers", "offload.decoder.experts"):
        monkeypatch.setattr(f"toolkit.{place}.HUGE_PAGE_BYTES", 4096)


def text(model, file, sampling):
    """The tokens that follow a prompt, of a context that the text fills."""
    writer = Writer(model, read_kept_tokenizer(read_header(file)), (), 60)
    return [piece.token for piece in writer.continued(TOKENS[:9], Request(sampling))]


@pytest.mark.parametrize(
    ("name", "kind", "sampling"),
    [("qwen2", "Q4_K", Sampling(0.7, 40, 0.9, seed=3)), ("gpt-oss", "MXFP4", Sampling())],
)
def test_the_text_is_that_of_the_model_alone(tmp_path, name, kind, sampling, small_pages):
    """With a draft that is always right, and with another model; in memory, and from disk."""
    random_file(name, kind, file := tmp_path / "model.gguf")
    write(CASES["llama"].model(), CASES["llama"], other := tmp_path / "other.gguf")
    with opened(file, context=60) as model:
        expected, whole = text(model, file, sampling), model.budget.used_bytes
    assert len(expected) == 51
    for draft_file, fixed, dram_bytes in ((file, None, MUCH), (other, 3, MUCH), (other, None, whole - 100_000)):
        with opened(draft_file, context=60) as draft, opened(file, dram_bytes, context=60) as model:
            drafted = Drafted(model, draft, fixed)
            assert text(drafted, file, sampling) == expected
            assert drafted.counts.tokens == 51 - 1  # the last one is chosen, and nothing follows it
            assert drafted.counts.drafted > 0


def test_a_draft_of_the_same_weights_is_always_right(tmp_path):
    """A pass checks three tokens and gives four: the first of the text comes from the prompt's logits."""
    random_file("qwen2", "Q4_K", file := tmp_path / "model.gguf")
    with opened(file, context=60) as draft, opened(file, context=60) as model:
        drafted = Drafted(model, draft, 3)
        tokens, counts = text(drafted, file, Sampling()), drafted.counts
        assert counts.passes + counts.accepted == len(tokens) - 1 == 50
        assert counts.passes == 13
        assert counts.drafted - counts.accepted == 1  # the text has ended before it
        assert 1 < counts.expected <= counts.drafted


def test_a_text_can_be_cut_within_what_was_proposed(tmp_path):
    random_file("qwen2", "Q4_K", file := tmp_path / "model.gguf")
    with opened(file, context=60) as draft, opened(file, context=60) as model:
        drafted = Drafted(model, draft, 4)
        drafted.prefill(TOKENS[:5])
        first = int(drafted.step(7).argmax())
        drafted.step(first)
        assert (drafted.length, model.length) == (7, 10)
        drafted.cut(5)
        assert (drafted.length, model.length, draft.length) == (5, 5, 5)
        found = drafted.scores([9, 8]), drafted.step(3)
    with opened(file, context=60) as model:
        model.prefill(TOKENS[:5])
        assert np.array_equal(found[0], model.scores([9, 8]))
        assert np.array_equal(found[1], model.step(3))


def test_drafts_that_cannot_serve_are_refused(tmp_path, small_pages):
    case = CASES["llama"]
    write(case.model(), case, file := tmp_path / "model.gguf")
    larger = replace(case, fields=dict(case.fields) | {"vocab_size": 256})
    write(larger.model(), larger, other := tmp_path / "other.gguf")
    (model, draft), room = (ModelFile.of(each) for each in (file, other)), TextRoom(4, 8)
    different = DraftedFile.beside(model, draft, None)
    with pytest.raises(UserError, match="256 words, the model 128"), different.open(MUCH, room):
        pass
    both = DraftedFile.beside(model, model, None)
    with pytest.raises(UserError, match="pieces do not fit into 0 MB for weights"), both.open(250_000, room):
        pass
    alone, together = model.overhead(room, True), both.overhead(room, True)
    assert together.cache == 2 * alone.cache
    assert together.logits - 2 * alone.logits == 2 * (MOST_DRAFTED + 1) * 4 * 128
    assert (together.compiler, together.opening) == (alone.compiler, alone.opening)
