"""Tiny random decoders of several families, with weights large enough for pruning to matter downstream."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from toolkit.sparsity.trace import Trace, pack

VOCABULARY, POSITIONS = 61, 48
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": POSITIONS}
GATED = COMMON | {"intermediate_size": 24, "num_key_value_heads": 2, "initializer_range": 0.2}
FAMILIES = {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, GATED | {"head_dim": 8, "sliding_window": 4, "bos_token_id": None}),
    "llama": (LlamaForCausalLM, LlamaConfig, GATED),
    "opt": (OPTForCausalLM, OPTConfig, COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 16, "init_std": 0.2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GATED | {"head_dim": 8}),
}


@pytest.fixture(autouse=True)
def _small(one_thread):
    """Every model here is small."""


@pytest.fixture
def tiny():
    """Make a tiny model: `tiny(family, blocks)`."""

    def make(family="llama", blocks=3, **options):
        model, config, sizes = FAMILIES[family]
        torch.manual_seed(0)
        return model(config(num_hidden_layers=blocks, **(sizes | options))).eval()

    return make


@pytest.fixture
def tokens():
    """Six windows of 16 tokens."""
    return torch.randint(0, VOCABULARY, (96,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def trace():
    """Make a trace of random bits: `trace(neurons, sequences, length, share)`, some neurons hotter than others."""

    def make(neurons=(13, 16), sequences=2, length=9, share=0.4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        bits = []
        for count in neurons:
            chance = (2 * share * torch.rand(count, generator=generator)).clamp(max=1)
            bits.append(pack(torch.rand(sequences, length, count, generator=generator) < chance))
        ids = torch.zeros(sequences, length, dtype=torch.int32)
        limits = torch.zeros(len(neurons))
        return Trace("tiny", "random", ids, tuple(neurons), tuple(bits), thresholds=limits)

    return make
