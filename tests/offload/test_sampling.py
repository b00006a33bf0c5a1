"""Temperature, top-k and top-p: by hand, and against transformers."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from toolkit.errors import UserError
from toolkit.offload.sampling import Sampler, Sampling, log_probabilities

HALVES = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))


def test_the_likeliest_token_is_taken_at_temperature_0():
    assert Sampler(Sampling())(np.array([1.0, 3.0, 2.0], dtype=np.float32)) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-30])
def test_a_temperature_near_0_takes_the_likeliest_token(temperature):
    """The quotients overflow."""
    logits = np.array([-700.0, 3.0, 2.0, -np.inf], dtype=np.float32)
    assert Sampler(Sampling(temperature))(logits) == 1


@pytest.mark.parametrize("damaged", [np.nan, np.inf])
def test_logits_that_no_token_can_be_chosen_by_are_refused(damaged):
    with pytest.raises(UserError, match="not numbers"):
        Sampler(Sampling(1.0))(np.array([0.0, damaged], dtype=np.float32))


BY_HAND = [
    ({}, [0.5, 0.25, 0.125, 0.125]),
    ({"temperature": 0.5}, [16 / 22, 4 / 22, 1 / 22, 1 / 22]),  # squares, over their sum
    ({"top_k": 1}, [1, 0, 0, 0]),
    ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
    ({"top_k": 3}, [0.5, 0.25, 0.125, 0.125]),  # equals of the third stay
    ({"top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),  # the fewest tokens that have 0.7 together
    ({"top_p": 0.4}, [1, 0, 0, 0]),
    ({"top_p": 0.01}, [1, 0, 0, 0]),
    ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),  # of the 2/3 and 1/3 that top-k leaves
]


@pytest.mark.parametrize(("settings", "expected"), BY_HAND)
def test_probabilities_by_hand(settings, expected):
    found = Sampling(**({"temperature": 1.0} | settings)).probabilities(HALVES)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_probabilities_are_those_of_transformers():
    numbers = np.random.default_rng(0)
    for trial in range(60):
        temperature, top_p = numbers.uniform(0.2, 2.0), numbers.uniform(0.05, 0.99)
        top_k, spread = int(numbers.integers(1, 120)), numbers.uniform(0.1, 6)
        logits = (spread * numbers.standard_normal(100)).astype(np.float32)
        logits[numbers.integers(0, 100, trial % 3)] = -np.inf
        scores = torch.from_numpy(logits)[None]
        for warper in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
            scores = warper(None, scores)
        found = Sampling(temperature, top_k, top_p).probabilities(logits)
        np.testing.assert_allclose(found, scores[0].softmax(-1), rtol=2e-5, atol=1e-7)


def test_tokens_come_as_often_as_their_probabilities_say_and_a_seed_repeats_them():
    draw, again, other = (Sampler(Sampling(1.0, seed=seed)) for seed in (3, 3, 4))
    tokens = [draw(HALVES) for _ in range(8000)]
    assert tokens == [again(HALVES) for _ in range(8000)]
    assert tokens[:50] != [other(HALVES) for _ in range(50)]
    for token, count in Counter(tokens).items():
        assert abs(count / 8000 - np.exp(HALVES[token])) < 0.02


def test_log_probabilities_are_those_of_torch():
    logits = np.random.default_rng(1).standard_normal((3, 50)).astype(np.float32) * 50
    np.testing.assert_allclose(log_probabilities(logits), torch.from_numpy(logits).double().log_softmax(-1), atol=1e-9)


@pytest.mark.parametrize(
    ("name", "wrong"), {"temperature": float("nan"), "top_k": -1, "top_p": 0.0, "seed": 2**32}.items()
)
def test_a_number_out_of_range_is_refused_by_name(name, wrong):
    with pytest.raises(UserError, match=f"{name} {wrong}"):
        Sampling(**{name: wrong})


def test_logits_that_are_no_numbers_are_refused():
    with pytest.raises(UserError, match="not numbers"):
        Sampler(Sampling())(np.array([0.0, np.nan], dtype=np.float32))
