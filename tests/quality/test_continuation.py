"""The perplexity of a continuation, against one token after the other."""

import math
import statistics

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests import naive_evaluation
from tests.notebook_code import functions_of

continuation_perplexity = functions_of("flash/tab07").continuation_perplexity


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.5)).eval()


def tokens_of(count):
    return torch.randint(50, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(("count", "prompt_tokens"), [(2, 1), (17, 5)])
def test_against_the_oracle(model, count, prompt_tokens):
    tokens = tokens_of(count)
    (losses,) = naive_evaluation.window_nlls(model, tokens, count)
    expected = math.exp(statistics.mean(losses[prompt_tokens - 1 :]))
    assert continuation_perplexity(model, tokens, prompt_tokens) == pytest.approx(expected, rel=1e-4)
