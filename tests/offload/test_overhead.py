import mmap

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from toolkit import memory_limits
from toolkit.errors import UserError
from toolkit.offload import overhead
from toolkit.offload.budget import Budget, BudgetError
from toolkit.offload.overhead import ROOM, Overhead, ProcessLimit, TextRoom, budget_within, cache_bytes

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 100}


def test_the_cache_counts_key_heads_types_and_windows():
    room, pair = ROOM, 2 * 2 * 8 * 2  # keys and values, 2 heads of 8, bfloat16
    full = LlamaConfig(num_key_value_heads=2, dtype="bfloat16", **SIZES)
    assert cache_bytes(full, 1000) == pair * (1000 + room) * (4 + 1)  # one layer more while it is copied
    kinds = ["full_attention", "sliding_attention"] * 2
    sliding = Qwen2Config(
        num_key_value_heads=2, dtype="bfloat16", use_sliding_window=True, sliding_window=100, layer_types=kinds, **SIZES
    )
    assert cache_bytes(sliding, 1000) == pair * (3 * (1000 + room) + 2 * (100 + room))
    assert cache_bytes(GPT2Config(n_embd=64, n_layer=4, n_head=8), 10) == 2 * 64 * 4 * (10 + room) * 5


def test_what_a_prompt_takes_grows_with_its_tokens():
    config = LlamaConfig(dtype="bfloat16", intermediate_size=128, **SIZES)
    few, many = Overhead.of(config, TextRoom(10, 5)), Overhead.of(config, TextRoom(1000, 5))
    assert many.prompt > 100 * few.prompt > 0
    assert many.logits == few.logits
    assert Overhead.of(config, TextRoom(1000, 5), all_logits=True).logits == 1000 * few.logits
    assert Overhead.of(config, TextRoom(10, 5), compiles=True).nbytes == few.nbytes + overhead.COMPILER
    config._attn_implementation = "eager"  # whose scores are in memory for all heads
    assert Overhead.of(config, TextRoom(1000, 5)).prompt > many.prompt + 8 * 1000**2 * 4


def test_each_expert_of_a_token_has_a_prompt_in_memory():
    of_one = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_hidden_layers": 4}
    dense, mixture = LlamaConfig(**of_one), MixtralConfig(num_experts_per_tok=2, **of_one)
    scores = 1000**2 * 4
    assert Overhead.of(dense, TextRoom(1000, 5)).prompt == 3 * 4 * 1000 * (2 * 64 + 128) + scores
    assert Overhead.of(mixture, TextRoom(1000, 5)).prompt == 3 * 4 * 1000 * 2 * (2 * 64 + 2 * 128) + scores


def test_each_expert_of_a_pass_has_its_spans():
    """By hand: 4 layers of 16 experts, of which a token takes 10, and each of a prompt's 3 passes all."""
    mixture = MixtralConfig(num_experts_per_tok=10, num_local_experts=16, **SIZES)
    passes = 3 * (overhead.SPANS + 2 * 16) + 5 * (overhead.SPANS + 2 * 10)
    assert Overhead.of(mixture, TextRoom(1000, 5, at_once=400)).timeline == overhead.SPAN * 4 * passes


@pytest.fixture
def free(monkeypatch):
    """Sets the free bytes of the process."""
    return lambda nbytes: monkeypatch.setattr(memory_limits, "free_bytes", lambda: nbytes)


def test_a_budget_leaves_room_for_the_rest(free):
    coming = Overhead(100_000_000, 0, 0, 0, 0, 0, 0)
    free(1_000_000_000)
    assert budget_within(None, 10**12, coming) == 800_000_000
    assert budget_within(800_000_000, 10**12, coming) == 800_000_000
    assert budget_within(10**12, 800_000_000, coming) == 10**12  # more than the folder can fill
    with pytest.raises(
        UserError, match=r"--dram 801MB: .* 100 MB more .* 1000 MB .* give --dram 800MB at most, or 2 MB"
    ):
        budget_within(801_000_000, 10**12, coming)
    free(111_000_000)
    with pytest.raises(UserError, match=r"111 MB of memory are free.*expected 112 MB free and the weights' own"):
        budget_within(None, 10**12, coming)
    with pytest.raises(UserError, match="no --dram is small enough"):
        budget_within(10_000_000, 10**12, coming)


def test_a_peak_is_seen():
    nbytes = 100_000_000
    with memory_limits.Peak() as peak:
        before = peak.look()
        # New pages of the system: the allocator may have as many bytes left of what earlier tests freed.
        with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            pages.write(b"1" * nbytes)
            assert peak.look() >= before + nbytes // 2
        assert peak.look() >= before + nbytes // 2


def test_a_limit_for_the_process_leaves_what_it_does_not_hold(free, monkeypatch):
    coming = Overhead(100_000_000, 0, 0, 0, 0, 0, 0)
    free(900_000_000)
    monkeypatch.setattr(memory_limits, "anonymous_bytes", lambda: 200_000_000)
    limit = ProcessLimit.now(700_000_000, coming)
    assert limit.budget(None) == limit.budget(500_000_000) == 400_000_000
    assert limit.budget(300_000_000) == 300_000_000  # both limits hold
    assert ProcessLimit.now(250_000_000, coming).budget(None) == 0
    with pytest.raises(UserError, match="only 900 MB of memory are free; give a limit of 1100MB at most"):
        ProcessLimit.now(1_200_000_000, coming).budget(None)
    words = r"of 700 MB for the process is too small: 758 MB are needed.* take 200 MB"
    with pytest.raises(BudgetError, match=words), limit.explained():
        Budget("DRAM", limit.budget(None)).check(rest=450_000_000)


def test_room_for_a_context_beyond_the_text():
    config = LlamaConfig(dtype="bfloat16", intermediate_size=128, **SIZES)
    assert Overhead.of(config, TextRoom(10, 5, 1000)).cache == cache_bytes(config, 1000)
    assert Overhead.of(config, TextRoom(10, 5, 3)).cache == cache_bytes(config, 15)
