"""Traces drawn at random, with the statistics that a paper publishes of its models. They serve latency only.

    law = UsageLaw.fit(active=0.10, exponent=1, new=0.024, tokens=5)  # OPT-6.7B (LLM in a flash, appendix C.1)
    trace = draw("opt-6.7b", [law] * 32, neurons=16384, tokens=300)

The usage of a neuron, the share of tokens that it is active for, falls with its rank as a power. Whether it is active
follows from whether it was so for the token before: a chain of two states. So tokens close to each other share neurons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64

from toolkit.activations.trace import Trace, pack
from toolkit.errors import UserError

CORPUS = "drawn at random"
STEPS = 60  # of each bisection
STEEPEST = 8.0  # exponent of usage over rank
RANKS = 4096  # that laws are fitted with
CLOSE = 1e-3  # relative: a law that misses by more does not exist


@dataclass(frozen=True)
class UsageLaw:
    """How the neurons of a layer are used.

    Args:
        active: the mean share of neurons that are active for a token.
        exponent: usage falls as rank to the power of −`exponent`, and is at most 1.
        persistence: the correlation of one token and the next, from 0 to 1, the same for all neurons.
    """

    active: float
    exponent: float
    persistence: float

    @classmethod
    def fit(cls, active: float, exponent: float, new: float, tokens: int) -> "UsageLaw":
        """The law under which the last of `tokens` tokens in a row brings a share `new` of the neurons.

        That is s_agg(k) − s_agg(k − 1), what is loaded for a token with a window of k − 1. Raises `UserError` if there
        is no such law.
        """
        if not 0 < active < 1 or not 0 <= exponent <= STEEPEST or tokens < 2:
            raise UserError(
                f"active {active}, exponent {exponent}, {tokens} tokens: expected a share between 0 and 1, an exponent "
                f"from 0 to {STEEPEST:g}, and 2 tokens or more"
            )
        law = bisect(lambda persistence: cls(active, exponent, persistence), lambda law: new - law.new(tokens), 0, 1)
        if abs(law.new(tokens) - new) > CLOSE * new:
            least, most = (cls(active, exponent, persistence).new(tokens) for persistence in (1, 0))
            raise UserError(
                f"new {new}: expected {least:.4f} to {most:.4f}, what token {tokens} can bring where {active} are "
                f"active and the exponent is {exponent}"
            )
        return law

    def usage(self, neurons: int = RANKS) -> Float64[np.ndarray, " neurons"]:
        """The share of tokens that each neuron is active for, by rank."""
        shape = np.arange(1, neurons + 1, dtype=np.float64) ** -self.exponent
        # the largest factor is one at which every neuron is always active
        return bisect(
            lambda log: np.minimum(1, np.exp(log) * shape),
            lambda usage: usage.mean() - self.active,
            np.log(self.active),
            -np.log(shape[-1]),
        )

    def aggregated(self, tokens: int, neurons: int = RANKS) -> float:
        """s_agg(k): the expected share of neurons that k = `tokens` tokens in a row use."""
        usage = self.usage(neurons)
        never = (1 - usage) * (1 - usage * (1 - self.persistence)) ** (tokens - 1)
        return float(1 - never.mean())

    def new(self, tokens: int) -> float:
        """s_agg(k) − s_agg(k − 1) for k = `tokens`: the expected share of neurons that one token more brings."""
        return self.aggregated(tokens) - self.aggregated(tokens - 1)


def draw(model: str, laws: Sequence[UsageLaw], neurons: int, tokens: int, seed: int = 0) -> Trace:
    """A trace of one sequence, a law for each layer. The ranks of a layer's neurons are in random order.

    The trace's model is named `model`; its corpus is `CORPUS`, its token ids are 0. Raises `UserError`
    for no layer, neuron or token.
    """
    if not laws or neurons < 1 or tokens < 1:
        raise UserError(f"{len(laws)} layers, {neurons} neurons, {tokens} tokens: expected 1 or more of each")
    bits = []
    for layer, law in enumerate(laws):
        generator = np.random.default_rng([seed, layer])
        usage = generator.permutation(law.usage(neurons)).astype(np.float32)
        chances = generator.random((tokens, neurons), dtype=np.float32)
        active = np.empty((1, tokens, neurons), bool)
        before = active[0, 0] = chances[0] < usage
        for token in range(1, tokens):
            chance = usage * (1 - law.persistence) + law.persistence * before
            before = active[0, token] = chances[token] < chance
        bits.append(pack(torch.from_numpy(active)))
    ids = torch.zeros(1, tokens, dtype=torch.int32)
    return Trace(model, CORPUS, ids, (neurons,) * len(laws), tuple(bits))


def bisect(make: Callable, error: Callable[..., float], low: float, high: float):
    """What `make` gives where the error, which rises from `low` to `high`, crosses 0; else at the nearer end."""
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if error(make(middle)) > 0 else (middle, high)
    return make((low + high) / 2)
