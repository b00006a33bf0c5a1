import copy
import math
import statistics

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests import naive_evaluation
from toolkit.errors import UserError
from toolkit.quality import Perplexity, likelihood, paired_difference, perplexity

VOCABULARY = 50


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.5,
        attention_dropout=0.5,
    )
    return LlamaForCausalLM(config).eval()


def random_tokens(count, seed=0):
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("count", "length"), [(37, 12), (32, 32), (9, 2)])
def test_against_the_oracle(model, monkeypatch, count, length):
    monkeypatch.setattr(likelihood, "LOGITS_AT_ONCE", 4)
    tokens = random_tokens(count)
    found, expected = perplexity(model, tokens, length), naive_evaluation.window_nlls(model, tokens, length)
    means = [statistics.mean(nlls) for nlls in expected]
    assert found == pytest.approx(math.exp(statistics.mean(means)), rel=1e-5)
    assert found.mean_nll == pytest.approx(statistics.mean(means), rel=1e-5)
    assert (found.sequence_length, found.windows) == (length, count // length)
    assert found.tokens == sum(map(len, expected))
    assert found.window_nll == pytest.approx(means, rel=1e-5)
    if len(means) > 1:
        error = found * statistics.stdev(means) / math.sqrt(len(means))
        assert found.standard_error == pytest.approx(error, rel=1e-4)
    else:
        assert math.isnan(found.standard_error)


def test_by_hand():
    found = Perplexity.of(torch.tensor([1.0, 3.0]), sequence_length=11)
    assert found == math.exp(2)
    assert found.tokens == 20
    assert found.standard_error == pytest.approx(math.exp(2) * math.sqrt(2) / math.sqrt(2))
    assert Perplexity.of(torch.tensor([1e6]), 2) == math.inf
    assert math.isnan(Perplexity.of(torch.tensor([math.nan]), 2))
    assert vars(copy.deepcopy(found)) == vars(found)


def test_paired_differences_by_hand():
    # the windows are far apart, the models are not: differences 0.1, 0.3, 0.2
    mean, error = paired_difference([1.1, 5.3, 9.2], [1.0, 5.0, 9.0])
    assert mean == pytest.approx(0.2)
    assert error == pytest.approx(0.1 / math.sqrt(3))
    first, second = (Perplexity.of(torch.tensor(nll), 8) for nll in ([1.1, 5.3, 9.2], [1.0, 5.0, 9.0]))
    assert mean == pytest.approx(math.log(first / second))
    mean, error = paired_difference([2.0], [1.5])
    assert mean == 0.5
    assert math.isnan(error)
    for unlike in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(UserError, match="cannot be paired"):
            paired_difference(*unlike)


def test_the_mode_is_put_back_and_dropout_is_off(model):
    tokens, expected = random_tokens(64), perplexity(model, random_tokens(64), 16)
    model.train()
    assert perplexity(model, tokens, 16) == expected
    assert model.training
    model.eval()


def test_bad_input(model):
    for tokens, options, names in (
        (random_tokens(15), {"sequence_length": 16}, "15 tokens do not fill one window of 16"),
        (torch.full((64,), VOCABULARY), {"sequence_length": 16}, "token id 50 is unknown to the model"),
    ):
        with pytest.raises(UserError, match=names):
            perplexity(model, tokens, **options)
