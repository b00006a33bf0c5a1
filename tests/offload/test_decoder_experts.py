"""Mixtures on NumPy arrays, against transformers' model with the same weights; from disk the same to the bit."""

import errno
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from tests.offload.test_decoder import TOKENS, logits, opened
from tests.offload.test_gguf_file import CASES, ROUNDED, random_file, write
from toolkit.kernels.mixture import add_gated, mix, route
from toolkit.offload.budget import BudgetError
from toolkit.offload.decoder.decoder import most_spans
from toolkit.offload.decoder.experts import _counts
from toolkit.residency.policies import Lfu

KINDS = {"mixtral": "Q3_K", "qwen2moe": "Q5_0", "qwen3moe": "Q4_K", "gpt-oss": "MXFP4"}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
@torch.no_grad()
def test_experts_from_disk_give_the_same_logits(tmp_path, name, kind, monkeypatch):
    """In memory for all of them, for the least, and for some in each block."""
    for place in ("storage.buffers", "offload.decoder.experts"):
        monkeypatch.setattr(f"toolkit.{place}.HUGE_PAGE_BYTES", 4096)
    model = random_file(name, kind, file := tmp_path / "model.gguf")
    with opened(file) as decoder:
        found = logits(decoder)
        assert decoder.read_bytes == sum(it.nbytes for it in layers(decoder))  # each expert once
        assert "DRAM for 100% of the experts" in decoder.held
        widest, whole = max(it.slot_bytes for it in decoder.file.experts), decoder.budget.used_bytes
    error = (found - model(torch.tensor([TOKENS])).logits[0]).square().mean(1).sqrt() / found.std()
    assert float(error.median()) < ROUNDED
    with pytest.raises(BudgetError, match="MB are needed") as refused:
        opened(file, 1000)
    for nbytes in (refused.value.needed_bytes, whole - 2 * widest, whole - 3 * widest):
        with opened(file, nbytes) as decoder:
            assert torch.equal(logits(decoder), found)
            assert decoder.budget.used_bytes <= nbytes
            assert decoder.mixtures.in_turn == (nbytes == refused.value.needed_bytes)


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_a_text_has_no_more_spans_than_memory_is_left_for(tmp_path, name, monkeypatch):
    """From the least memory: each pass reads all that it needs."""
    for place in ("storage.buffers", "offload.decoder.experts"):
        monkeypatch.setattr(f"toolkit.{place}.HUGE_PAGE_BYTES", 4096)
    write(CASES[name].model(), CASES[name], file := tmp_path / "model.gguf")
    with pytest.raises(BudgetError) as refused:
        opened(file, 1000)
    with opened(file, refused.value.needed_bytes, timed=True) as decoder:
        decoder.prefill(TOKENS[:20])
        for token in TOKENS[20:25]:
            decoder.step(token)
        found, most = len(decoder.recorder.timeline().spans), most_spans(decoder.sizes, 20)
        most += 5 * most_spans(decoder.sizes, 1)
    assert most / 3 < found <= most  # experts that stay are not read again


def layers(decoder):
    return [experts[number] for experts in decoder.file.experts for number in range(len(experts))]


def test_another_residency_is_chosen_by_its_name(tmp_path):
    write(CASES["qwen3moe"].model(), CASES["qwen3moe"], file := tmp_path / "model.gguf")
    with opened(file, residency="lfu") as decoder:
        assert type(decoder.mixtures.slots[1].cache.residency) is Lfu


def test_slots_are_shared_out():
    """In bytes of one expert of each block. The first blocks get one more while there is room."""
    assert _counts([10, 10, 10], least=2, most=8, room=100) == [4, 3, 3]
    assert _counts([10, 20, 10], least=2, most=8, room=105) == [3, 2, 3]
    assert _counts([10, 10], least=2, most=8, room=1000) == [8, 8]
    assert _counts([10, 10], least=2, most=8, room=float("inf")) == [8, 8]
    assert _counts([10, 10], least=2, most=8, room=39) == []


def test_after_a_read_that_failed_the_text_goes_on(tmp_path, monkeypatch):
    write(CASES["qwen3moe"].model(), CASES["qwen3moe"], file := tmp_path / "model.gguf")
    with opened(file) as decoder:
        expected = decoder.step(5)
        for slots in decoder.mixtures.slots:
            slots.clear()
        failed: Future[None] = Future()
        failed.set_exception(OSError(errno.EIO, "bad sector"))
        with monkeypatch.context() as patch:
            patch.setattr(decoder.mixtures.slots[1]._reader, "submit", lambda *_: failed)
            decoder.cut(0)
            with pytest.raises(OSError, match="bad sector"):
                decoder.step(5)
        decoder.cut(0)
        assert np.array_equal(decoder.step(5), expected)


def test_the_router_by_hand():
    """Softmax of 1, 2 and 3; of equal scores the first."""
    scores = np.log(np.array([[1, 3, 2, 0.1], [2, 2, 2, 2]], np.float32))
    experts, weights = np.zeros((2, 2), np.int64), np.zeros((2, 2), np.float32)
    route(scores, False, experts, weights)
    assert experts.tolist() == [[1, 2], [0, 1]]
    np.testing.assert_allclose(weights, [[3 / 6.1, 2 / 6.1], [0.25, 0.25]], rtol=1e-5)
    route(scores, True, experts, weights)
    np.testing.assert_allclose(weights, [[0.6, 0.4], [0.5, 0.5]], rtol=1e-5)
    route(np.full((1, 3), np.nan, np.float32), True, experts[:1], weights[:1])
    assert experts[0].tolist() == [0, 1]


def test_outputs_are_mixed_by_hand():
    outputs, out = np.array([[1, 2], [10, 20], [100, 200]], np.float32), np.full((1, 2), np.nan, np.float32)
    mix(outputs, np.array([[2, 0]]), np.array([[0.5, 2]], np.float32), out)
    assert out.tolist() == [[52, 104]]
    add_gated(np.array([[4, 8]], np.float32), np.zeros((1, 1), np.float32), out)
    assert out.tolist() == [[54, 108]]
