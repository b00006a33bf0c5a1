"""Mixtures of experts: how well a layer predicts the next one, and which experts and neurons stay in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd
from jaxtyping import Float32
from torch import Tensor

from toolkit.cache import kept
from toolkit.models.activation import activation_name
from toolkit.predictors import Samples
from toolkit.predictors.next_layer import expert_samples, gate_limits
from toolkit.residency.policies import RESIDENCIES, residency_of
from toolkit.residency.replay import replay, units_of
from toolkit.sparsity.changed import LOADING
from toolkit.sparsity.recording import record_routing
from toolkit.sparsity.route_traces import load_route_trace
from toolkit.sparsity.trace import Trace
from toolkit.studies.loaded import loaded, tokens_of, weights_key
from toolkit.studies.quality import EvaluationSettings

# the last equals LRU within one layer
POLICIES = tuple(name for name in RESIDENCIES if name not in ("window", "least_stale"))


@dataclass(frozen=True)
class RoutedModel:
    """A model with experts, the text that it is run over, and the share of an expert's neurons that is left out."""

    model: str = "smollm2-135m-moe-upcycled"
    corpus: str = "wiki-slice"
    windows: int = 1
    """Windows of calibration text, and of evaluation text."""
    sequence_length: int = 256
    zeros: float = 0.55
    """Share of the neurons of used experts whose |act(W1 · x)| a layer's limit θ cuts, on calibration text."""

    @property
    def text(self) -> EvaluationSettings:
        """The evaluation text, to measure the model's quality on."""
        return EvaluationSettings(self.model, self.corpus, self.sequence_length, self.windows)


@cache
def samples(setting: RoutedModel, split: str) -> Samples:
    """The inputs of the mixtures over a split of the text, and the experts that their routers choose."""
    tokens = tokens_of(setting.model, setting.corpus, split)
    return expert_samples(loaded(setting.model)[0], tokens, setting.windows, setting.sequence_length)


@cache
def limits(setting: RoutedModel) -> Float32[Tensor, " layers"]:
    """θ of each mixture."""
    model = loaded(setting.model)[0]
    return gate_limits(model, samples(setting, "calibration"), setting.zeros, activation_name(model))


@cache
def routing_of(source: RoutedModel | str) -> Trace:
    """The routing of a model over evaluation text, or one of `ROUTE_TRACES` by its name."""
    if isinstance(source, str):
        return load_route_trace(source)
    model, tokens = loaded(source.model)[0], tokens_of(source.model, source.corpus, "evaluation")
    return record_routing(model, source.model, tokens, source.corpus, source.windows, source.sequence_length)


def every(trace: Trace, step: int) -> Trace:
    """The trace of every `step`-th layer."""
    layers = slice(None, None, step)
    weights = None if trace.weights is None else trace.weights[layers]
    return replace(trace, units=trace.units[layers], bits=trace.bits[layers], weights=weights)


def policy_table(trace: Trace, shares: Sequence[float], policies: Sequence[str] = POLICIES) -> pd.DataFrame:
    """The share of needed experts that a cache by layer holds, for each policy and share of a layer's experts.

    The first sequence is replayed. The first half of the tokens fills the memory, gives the static profile its
    frequencies, and does not count. Columns: policy, memory (the share asked for), slots, experts (of the layer),
    expert_hits. Raises `UserError` for an unknown policy.
    """
    rows = []
    layers = [units_of(trace.active(layer)[0].numpy()) for layer in range(trace.layers)]
    experts, half = trace.units[0], trace.tokens.shape[1] // 2
    fewest = max(len(needed) for tokens in layers for needed in tokens)
    wanted = sum(len(needed) for tokens in layers for needed in tokens[half:])
    often = [np.bincount(np.concatenate(tokens[:half]), minlength=experts).astype(float) for tokens in layers]
    for share, slots in distinct_slots(shares, fewest, experts):
        for policy in policies:
            late = sum(
                replay(tokens, residency_of(policy, experts, slots, tokens, frequency))["loaded"][half:].sum()
                for tokens, frequency in zip(layers, often, strict=True)
            )
            row = {"policy": policy, "memory": share, "slots": slots, "experts": experts}
            rows.append(row | {"expert_hits": 1 - late / wanted})
    return pd.DataFrame(rows)


@kept("routing", without=LOADING, key=weights_key)
def own_policies(setting: RoutedModel, shares: Sequence[float], policies: Sequence[str] = POLICIES) -> pd.DataFrame:
    """`policy_table` of a model's own routing."""
    return policy_table(routing_of(setting), shares, policies)


def distinct_slots(shares: Sequence[float], fewest: int, experts: int) -> Iterator[tuple[float, int]]:
    """Each share with its slots, which hold one token's experts at least; the first of several with the same slots."""
    slots: dict[int, float] = {}
    for share in shares:
        slots.setdefault(max(fewest, round(share * experts)), share)
    return ((share, count) for count, share in slots.items())
