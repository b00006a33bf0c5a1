"""Tiny random decoders, with and without a gate, and traces of random bits."""

import pytest
import torch

from tests.pruning.conftest import _small, tiny, tokens  # noqa: F401
from toolkit.activations.trace import Trace, pack


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
