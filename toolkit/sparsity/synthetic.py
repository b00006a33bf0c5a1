"""Traces drawn at random, with the statistics that a paper publishes of its models. They serve latency only.

    law = UsageLaw.fit(active=0.10, new=0.024, window=4)  # OPT-6.7B (LLM in a flash, appendix C.1)
    trace = draw("opt-6.7b", [law] * 32, neurons=16384, tokens=300)

    law = BetaLaw(active=0.20, far=0.70, near=0.90)  # LLaMA-13B (Hermes, figures 3 and 4)
    trace = draw("llama-13b", [law] * 40, neurons=13824, tokens=256, copied=0.5, drift=Drift(0.52, start=128))

The usage of a neuron, the share of tokens that it is active for, falls with its rank: as a power (`UsageLaw`), or as
quantiles of a beta distribution (`BetaLaw`). Whether it is active follows from whether it was so for the token before:
a chain of two states. So tokens close to each other share neurons.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int32, UInt8

from toolkit.errors import UserError
from toolkit.kernels.drawing import draw_layer
from toolkit.sparsity.trace import UNITS, Trace

CORPUS = "drawn at random"
STEPS = 60  # of each bisection
STEEPEST = 8.0  # exponent of usage over rank
RANKS = 4096  # that laws are fitted with
CLOSE = 1e-3  # relative: a law that misses by more does not exist
LOGITS, TAIL = 1 << 16, 40.0  # points that a beta distribution is summed over, and nats of its tails


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
    def fit(cls, active: float = 0.10, new: float = 0.024, window: int = 4, exponent: float = 1.0) -> "UsageLaw":
        """The law under which a token brings a share `new` of the neurons to those of the `window` tokens before it.

        That is s_agg(k + 1) − s_agg(k) for a window of k. The defaults are OPT-6.7B's predicted and loaded neurons (LLM
        in a flash, appendix C.1). Raises `UserError` if there is no such law.
        """
        if not 0 < active < 1 or not 0 <= exponent <= STEEPEST or window < 1:
            raise UserError(
                f"active {active}, exponent {exponent}, window {window}: expected a share between 0 and 1, an exponent "
                f"from 0 to {STEEPEST:g}, and 1 token or more"
            )
        tokens = window + 1
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


@dataclass(frozen=True)
class BetaLaw:
    """Usage that is beta distributed over neurons, given by what a paper publishes: three shares of neurons.

    Args:
        active: the mean share of neurons that are active for a token, E[u].
        far: the share of a token's neurons that a distant token uses, too: chance, E[u²] / E[u].
        near: the share of a token's neurons that the token before it used.

    BetaLaw(0.20, 0.70, 0.90), from figures 3 and 4 of Hermes, is Beta(0.12, 0.48) with a persistence of 2/3. Raises
    `UserError` unless 0 < active < far < 1 and far ≤ near ≤ 1.
    """

    active: float
    far: float
    near: float

    def __post_init__(self):
        """Refuse shares that no law has."""
        if not (0 < self.active < self.far < 1 and self.far <= self.near <= 1):
            raise UserError(
                f"active {self.active}, far {self.far}, near {self.near}: expected shares with active < far ≤ near, "
                "since two tokens share neurons by chance, and neighbours no fewer"
            )

    @property
    def shape(self) -> tuple[float, float]:
        """The parameters of the beta distribution."""
        total = (1 - self.far) / (self.far - self.active)
        return total * self.active, total * (1 - self.active)

    @property
    def persistence(self) -> float:
        """The correlation of one token and the next."""
        return (self.near - self.far) / (1 - self.far)

    def shared(self, distance: int) -> float:
        """The expected share of a token's neurons that a token some way before it used, too."""
        return self.far + self.persistence**distance * (1 - self.far)

    def usage(self, neurons: int = RANKS) -> Float64[np.ndarray, " neurons"]:
        """The share of tokens that each neuron is active for: means of equal parts of the distribution, largest first.

        Their mean is `active`. The distribution has poles at 0 and 1; over the logit of usage its density is smooth.
        """
        first, second = self.shape
        logits = np.linspace(TAIL / second, -TAIL / first, LOGITS)
        weight = np.exp(-first * np.logaddexp(0, -logits) - second * np.logaddexp(0, logits))
        sums = np.cumsum([weight, weight / (1 + np.exp(-np.maximum(logits, -500)))], axis=1)
        above = np.interp(np.linspace(0, sums[0, -1], neurons + 1), sums[0], sums[1], left=0)
        return np.minimum(1, np.diff(above) * (self.active * neurons / above[-1]))


@dataclass(frozen=True)
class Drift:
    """Hot neurons whose usage changes: each exchanges it with a cold neuron, at a token drawn at random.

    Args:
        share: the share of the hot neurons that exchange it (Hermes, section III-B: about 52 % of the neurons hot at
            first).
        hot: the share of a layer's neurons that are hot, the most used.
        start: the first token at which one can change, the length of a prompt.

    Neurons of the same rank change alike in all layers, so that parents and children keep a common usage. Raises
    `UserError` unless 0 ≤ share ≤ 1, 0 < hot ≤ 0.5 and start ≥ 0.
    """

    share: float
    hot: float = 0.2
    start: int = 0

    def __post_init__(self):
        """Refuse impossible shares."""
        if not (0 <= self.share <= 1 and 0 < self.hot <= 0.5 and self.start >= 0):
            raise UserError(
                f"drift of a share {self.share} of {self.hot} hot neurons from token {self.start}: expected a share up "
                "to 1, hot up to 0.5, since the others are cold, and a token from 0"
            )

    def exchanges(self, neurons: int, tokens: int, seed: int) -> Int32[np.ndarray, "3 exchanges"]:
        """Tokens (rising), and the two ranks that exchange their usage there; each rank does so once at most."""
        generator = np.random.default_rng([seed, neurons, tokens])
        hot = round(self.hot * neurons)
        count = round(self.share * hot) if self.start < tokens else 0
        when = np.sort(generator.integers(min(self.start, tokens - 1), tokens, count))
        pairs = (generator.permutation(hot)[:count], hot + generator.permutation(neurons - hot)[:count])
        return np.stack([when, *pairs]).astype(np.int32)


def draw(
    model: str,
    laws: Sequence[UsageLaw | BetaLaw],
    neurons: int,
    tokens: int,
    seed: int = 0,
    copied: float = 0.0,
    drift: Drift | None = None,
    unit: str = UNITS[0],
) -> Trace:
    """A trace of one sequence, made of what `draw_layers` gives.

    Its model is named `model`, its corpus is `CORPUS`, its token ids are 0. Raises what `draw_layers` raises.
    """
    layers = draw_layers(laws, neurons, tokens, seed, copied, drift, unit)
    bits = tuple(torch.from_numpy(np.packbits(active, axis=-1, bitorder="little"))[None] for active in layers)
    return Trace(model, CORPUS, torch.zeros(1, tokens, dtype=torch.int32), (neurons,) * len(laws), bits, unit)


def draw_layers(
    laws: Sequence[UsageLaw | BetaLaw],
    neurons: int,
    tokens: int,
    seed: int = 0,
    copied: float = 0.0,
    drift: Drift | None = None,
    unit: str = UNITS[0],
) -> Iterator[UInt8[np.ndarray, "tokens neurons"]]:
    """Which neurons are active for each token, 1 or 0, layer after layer; one layer is in memory at a time.

    The ranks of a layer's neurons are in random order (`ranks`).

    Args:
        laws: one for each layer.
        neurons: of a layer.
        tokens: of the only sequence.
        seed: the same seed gives the same trace.
        copied: the chance with which a neuron does what its parent does: both fire, fall idle, or stay as they are. Its
            parent is the neuron of the same rank in the layer before, and every neuron keeps its law.
        drift: hot neurons that exchange their usage with cold ones.
        unit: FFN neurons and attention neurons of the same seed are drawn independently of each other.

    Raises `UserError`, at the first layer, for no layer, neuron or token, for `copied` outside of 0 to 1, or with laws
    that differ.
    """
    if not laws or neurons < 1 or tokens < 1:
        raise UserError(f"{len(laws)} layers, {neurons} neurons, {tokens} tokens: expected 1 or more of each")
    if not 0 <= copied <= 1 or (copied and len(set(laws)) > 1):
        raise UserError(f"copied {copied}: expected a chance from 0 to 1, and above 0 the same law for all layers")
    usages = {law: law.usage(neurons) for law in set(laws)}
    when, *pairs = (drift or Drift(0)).exchanges(neurons, tokens, seed)
    events, linked = np.empty(0, np.uint8), {}
    for layer, law in enumerate(laws):
        place = ranks(neurons, layer, seed, unit)
        usage, parents = np.empty(neurons, np.float32), np.empty(neurons, np.int32)
        usage[place] = usages[law]
        first, second = (place[pair] for pair in pairs)
        changes = (when.repeat(2), np.stack([first, second], 1).ravel(), usage[np.stack([second, first], 1)].ravel())
        seeds = _generator(layer, seed, unit, 1).integers(1, 1 << 64, neurons, dtype=np.uint64)
        if layer and copied:
            parents[place] = ranks(neurons, layer - 1, seed, unit)
            linked = {"parents": parents, "before": events, "copied": copied}
        active, events = draw_layer(usage, law.persistence, tokens, seeds, changes=changes, **linked)
        yield active


def ranks(neurons: int, layer: int, seed: int = 0, unit: str = UNITS[0]) -> Int32[np.ndarray, " neurons"]:
    """The neurons of a drawn layer by usage before any drift, the most used first."""
    return _generator(layer, seed, unit, 0).permutation(neurons).astype(np.int32)


def _generator(layer: int, seed: int, unit: str, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, layer, UNITS.index(unit), purpose])


def bisect(make: Callable, error: Callable[..., float], low: float, high: float):
    """The result of `make` where the error, which rises from `low` to `high`, crosses 0; else at the nearer end."""
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if error(make(middle)) > 0 else (middle, high)
    return make((low + high) / 2)
