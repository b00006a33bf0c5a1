"""How the next token is chosen from logits: the likeliest one, or one drawn by temperature, top-k and top-p.

    choose = Sampler(Sampling(temperature=0.8, top_p=0.95, seed=1))
    token = choose(logits)    # floats [vocabulary]

The settings apply in transformers' order: temperature, then top-k, then top-p (Holtzman et al., "The Curious Case of
Neural Text Degeneration", 2020), with the same probabilities. NumPy draws, so a seed gives the same text on every
machine that computes the same logits.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from toolkit.errors import UserError

SEEDS = 2**32


@dataclass(frozen=True)
class Sampling:
    """The settings. A `temperature` of 0 takes the likeliest token; `top_k` 0 and `top_p` 1 leave all tokens in.

    Raises `UserError` for a number out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        """Refuse what is out of range."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature {self.temperature}: expected 0 (the likeliest token) or a number above it")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k}: expected a whole number from 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p}: expected a share above 0, and 1 at most")
        if not 0 <= self.seed < SEEDS:
            raise UserError(f"seed {self.seed}: expected a whole number from 0 to {SEEDS - 1}")

    def probabilities(self, logits: Float[np.ndarray, " vocabulary"]) -> Float64[np.ndarray, " vocabulary"]:
        """The probability of each token, for a temperature above 0. Tokens that top-k or top-p leave out have 0."""
        with np.errstate(over="ignore"):  # a tiny temperature makes all but the likeliest infinitely unlikely
            scores = (logits.astype(np.float64) - logits.max()) / self.temperature
        if 0 < self.top_k < len(scores):
            scores[scores < np.partition(scores, -self.top_k)[-self.top_k]] = -np.inf
        chances = _softmax(scores)
        if self.top_p < 1:
            chances[_unlikely(chances, 1 - self.top_p)] = 0
            chances /= chances.sum()
        return chances


class Sampler:
    """Chooses one token after the other by the same settings. Its random numbers are those of the seed."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    def __call__(self, logits: Float[np.ndarray, " vocabulary"]) -> int:
        """The next token. Raises `UserError` for logits of which one is no number, or the largest is infinite."""
        if not np.isfinite(logits.max()):
            raise UserError(
                "the model's logits are not numbers (NaN) or infinite: its weights, or the file, are damaged"
            )
        if not self.sampling.temperature:
            return int(logits.argmax())
        reached = self.sampling.probabilities(logits).cumsum()
        return int(np.searchsorted(reached, self._random.random() * reached[-1], side="right"))


def log_probabilities(logits: Float[np.ndarray, "... vocabulary"]) -> Float64[np.ndarray, "... vocabulary"]:
    """The natural logarithm of the softmax over the last axis."""
    scores = logits.astype(np.float64)
    scores -= scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    return scores


def _softmax(scores: Float64[np.ndarray, " vocabulary"]) -> Float64[np.ndarray, " vocabulary"]:
    chances = np.exp(scores - scores.max())
    return chances / chances.sum()


def _unlikely(chances: Float64[np.ndarray, " vocabulary"], share: float) -> np.ndarray:
    """The indices of the least likely tokens that have no more than this share together; the likeliest is not in it.

    Tokens with less than the share's even part all belong to them, so that few of a large vocabulary are sorted.
    """
    sure = chances <= share / len(chances)
    left = np.flatnonzero(~sure)
    left = left[np.argsort(chances[left], kind="stable")]
    reached = chances[sure].sum() + chances[left].cumsum()
    return np.concatenate([np.flatnonzero(sure), left[:-1][reached[:-1] <= share]])
