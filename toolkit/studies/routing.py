"""Mixtures of experts: how well a layer foretells the next, and what stays in memory of experts and neurons."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from toolkit.activations.route_traces import load_route_trace, route_trace_file
from toolkit.activations.routing import mixtures, record_routing
from toolkit.activations.synthetic import BetaLaw
from toolkit.activations.trace import Trace
from toolkit.cache import kept
from toolkit.errors import unknown
from toolkit.files import file_sha256
from toolkit.models.activation import activation_name
from toolkit.models.experts import Experts
from toolkit.policies.least_stale import LeastStale
from toolkit.policies.residencies import RESIDENCIES
from toolkit.policies.residency import Residency
from toolkit.policies.two_level import Needed, TwoLevel
from toolkit.predictors import Samples
from toolkit.predictors.next_layer import expert_samples, gate_limits, predict_experts, predict_neurons
from toolkit.simulation.expert_replay import needed_of, rates, replay_experts, replay_global, with_drawn_neurons
from toolkit.simulation.replay import replay, units_of
from toolkit.studies.loaded import LOADING, loaded, weights_key
from toolkit.studies.quality import EvaluationSettings
from toolkit.text import load_tokens

POLICIES = ("lru", "lfu", "hot_table", "static", "random", "belady")  # of a cache by layer; there least stale is LRU
GLOBAL = ("lru", "least_stale", "belady")  # of one cache for all layers


@dataclass(frozen=True)
class RoutedModel:
    """A model with experts, the text that it is run over, and the share of an expert's neurons that is left out."""

    model: str = "smollm2-135m-moe-split"
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


def trace_key(name: str) -> dict[str, str]:
    """The inputs of a result beside the name of a route trace, for the cache."""
    return {"trace_sha256": file_sha256(route_trace_file(name))}


@cache
def samples(setting: RoutedModel, split: str) -> Samples:
    """The inputs of the mixtures over a split of the text, and the experts that their routers choose."""
    model, tokenizer, _ = loaded(setting.model)
    tokens = load_tokens(setting.corpus, tokenizer, split)
    return expert_samples(model, tokens, setting.windows, setting.sequence_length)


@cache
def limits(setting: RoutedModel) -> Float32[Tensor, " layers"]:
    """θ of each mixture."""
    model = loaded(setting.model)[0]
    return gate_limits(model, samples(setting, "calibration"), setting.zeros, activation_name(model))


@cache
def routing_of(source: RoutedModel | str) -> Trace:
    """The routing of a model over evaluation text, or one of `ROUTE_TRACES` by its name."""
    if isinstance(source, str):
        return load_route_trace(source).trace
    model, tokenizer, _ = loaded(source.model)
    tokens = load_tokens(source.corpus, tokenizer, "evaluation")
    return record_routing(model, source.model, tokens, source.corpus, source.windows, source.sequence_length)


def every(trace: Trace, step: int) -> Trace:
    """The trace of every `step`-th layer."""
    layers = slice(None, None, step)
    weights = None if trace.weights is None else trace.weights[layers]
    return replace(trace, units=trace.units[layers], bits=trace.bits[layers], weights=weights)


def policy_table(trace: Trace, shares: Sequence[float], policies: Sequence[str] = POLICIES) -> pd.DataFrame:
    """The share of needed experts that a cache by layer holds, for each policy and share of a layer's experts.

    The first sequence is replayed. The first half of the tokens fills the memory, gives
    the static profile its frequencies, and does not count. Columns: policy, memory (the share asked for), slots,
    experts (of the layer), expert_hits. Raises `UserError` for an unknown policy.
    """
    rows = []
    layers = _tokens(trace)
    experts, half = trace.units[0], trace.tokens.shape[1] // 2
    fewest = max(len(needed) for tokens in layers for needed in tokens)
    wanted = sum(len(needed) for tokens in layers for needed in tokens[half:])
    for share, slots in _distinct(shares, fewest, experts):
        for policy in policies:
            late = sum(
                replay(tokens, _policy(policy, tokens, experts)(experts, rows=slots))["loaded"][half:].sum()
                for tokens in layers
            )
            row = {"policy": policy, "memory": share, "slots": slots, "experts": experts}
            rows.append(row | {"expert_hits": 1 - late / wanted})
    return pd.DataFrame(rows)


@kept("routing", without=LOADING, key=weights_key)
def own_policies(setting: RoutedModel, shares: Sequence[float], policies: Sequence[str] = POLICIES) -> pd.DataFrame:
    """`policy_table` of a model's own routing."""
    return policy_table(routing_of(setting), shares, policies)


@kept("routing", key=trace_key)
def one_cache(name: str, cycles: Sequence[float], step: int) -> pd.DataFrame:
    """`global_table` of one of `ROUTE_TRACES` by its name, every `step`-th layer."""
    return global_table(every(routing_of(name), step), cycles)


def global_table(trace: Trace, cycles: Sequence[float], policies: Sequence[str] = GLOBAL) -> pd.DataFrame:
    """The share of needed experts that one cache for all layers holds, beside LRU by layer with as many slots in all.

    `cycles` are its sizes, over what a token uses of all layers. Only the second half of the tokens counts. Columns:
    policy, cycles, slots (of all layers), expert_hits.
    """
    rows, half = [], trace.tokens.shape[1] // 2
    token = max(sum(len(units) for units in each) for each in zip(*_tokens(trace), strict=True))
    for size in cycles:
        room = max(1, round(size * token))
        for policy in policies:
            found = replay_global(trace, max(room, _widest(trace)), partial(_global_policy, policy, trace.layers))
            counted = found[found["token"] >= half]
            hits = 1 - counted["loaded"].sum() / counted["needed"].sum()
            rows.append({"policy": f"{policy}, all layers", "cycles": size, "slots": room, "expert_hits": hits})
        each = room // trace.layers
        if each >= _widest(trace):
            hits = policy_table(trace, [each / trace.units[0]], ["lru"])["expert_hits"][0]
            rows.append({"policy": "lru, by layer", "cycles": size, "slots": room, "expert_hits": hits})
    return pd.DataFrame(rows)


def drawn_tokens(trace: Trace, law: BetaLaw, neurons: int, seed: int = 0) -> list[list[Needed]]:
    """For each layer, what each token needs: the experts of a trace with neurons drawn from a law."""
    units = enumerate(trace.units)
    return [with_drawn_neurons(needed_of(trace, n), law, experts, neurons, seed + n) for n, experts in units]


@torch.no_grad()
def own_tokens(setting: RoutedModel) -> tuple[list[list[Needed]], list[list[Needed] | list[None]]]:
    """For each mixture, what each token of the first window needs, and what the layer before foretells of it.

    Experts of a token stand in falling order of their scores. Nothing is foretold in the first mixture.
    """
    model, found, thetas = loaded(setting.model)[0], samples(setting, "evaluation"), limits(setting)
    act, length = activation_name(model), setting.sequence_length
    needed: list[list[Needed]] = []
    expected: list[list[Needed] | list[None]] = []
    for layer, experts in enumerate(mixtures(model)):
        theta = float(thetas[layer])
        x = found.inputs[layer][:length]
        needed.append(_neurons_of(experts, x, found.active(layer)[:length], theta, act))
        if not layer:
            expected.append([None] * length)
            continue
        before = found.inputs[layer - 1][:length]
        ids = predict_experts(before, experts)
        named = torch.zeros(length, experts.count, dtype=torch.bool).scatter_(1, ids.cpu(), True)
        guessed = _neurons_of(experts, before, named, theta, act)
        order = [
            [expert for expert in row if expert in token] for row, token in zip(ids.tolist(), guessed, strict=True)
        ]
        expected.append([{e: token[e] for e in row} for row, token in zip(order, guessed, strict=True)])
    return needed, expected


def two_level_table(
    tokens: Sequence[Sequence[Needed]],
    experts: int,
    neurons: int,
    shares: Sequence[float],
    policies: Sequence[str] = ("lru",),
    expected: Sequence[Sequence[Needed | None]] | None = None,
) -> pd.DataFrame:
    """Hits of experts and of neurons, and what a token loads, with a cache of both in each layer.

    The first half of the tokens fills the memory and does not count. With `expected`, what the layer before foretells
    is prefetched. Columns: policy, memory (share of the experts asked for), slots, expert_hits and neuron_hits (of what
    is needed, in memory when needed); over the neurons that a token's experts have: needed_share, loaded_share,
    prefetched_share and wasted_share; predicted_share (of all neurons of the layers, foretold).
    """
    rows, half = [], len(tokens[0]) // 2
    fewest = max(len(needed) for layer in tokens for needed in layer)
    for share, slots in _distinct(shares, fewest, experts):
        for policy in policies:
            counts = []
            for number, layer in enumerate(tokens):
                needed = [np.array(sorted(token), dtype=np.int64) for token in layer]
                cached = TwoLevel(experts, neurons, slots, _policy(policy, needed, experts))
                ahead = expected[number] if expected is not None else None
                counts.append(replay_experts(layer, cached, ahead)[half:])
            total = sum(counts[1:], counts[0])  # of all layers, a row for each token
            found = rates(total, neuron_bytes=1)
            whole = neurons * total["needed"].mean()
            row = {"policy": policy, "memory": share, "slots": slots}
            row |= {name: found[name] for name in ("expert_hits", "neuron_hits")}
            row |= {"needed_share": total["neurons_needed"].mean() / whole}
            row |= {f"{name}_share": found[f"{name}_bytes"] / whole for name in ("loaded", "prefetched", "wasted")}
            rows.append(row | {"predicted_share": _predicted(expected, neurons * experts * len(tokens), half)})
    return pd.DataFrame(rows)


@kept("routing", key=trace_key)
def drawn_two_levels(
    name: str, law: BetaLaw, neurons: int, shares: Sequence[float], step: int, seed: int = 0
) -> pd.DataFrame:
    """`two_level_table` of one of `ROUTE_TRACES` by its name, every `step`-th layer, with neurons drawn from a law."""
    trace = every(routing_of(name), step)
    return two_level_table(drawn_tokens(trace, law, neurons, seed), trace.units[0], neurons, shares)


@kept("routing", without=LOADING, key=weights_key)
def own_two_levels(setting: RoutedModel, shares: Sequence[float], step: int) -> pd.DataFrame:
    """`two_level_table` of a model, with recorded neurons: without a prefetch and with one, as the column trace says.

    The layers are the second, since nothing foretells the first, and every `step`-th after it.
    """
    needed, expected = (rows[1::step] for rows in own_tokens(setting))
    first = mixtures(loaded(setting.model)[0])[0]
    ways = {"recorded": None, "recorded, ahead": expected}
    tables = [
        two_level_table(needed, first.count, first.neurons, shares, expected=ahead).assign(trace=label)
        for label, ahead in ways.items()
    ]
    return pd.concat(tables, ignore_index=True)


def _distinct(shares: Sequence[float], fewest: int, experts: int) -> Iterator[tuple[float, int]]:
    """Each share with its slots, which hold one token's experts at least; the first of several with the same slots."""
    slots: dict[int, float] = {}
    for share in shares:
        slots.setdefault(max(fewest, round(share * experts)), share)
    return ((share, count) for count, share in slots.items())


def _predicted(expected: Sequence[Sequence[Needed | None]] | None, neurons: int, half: int) -> float:
    """The share of all neurons that is foretold for a token."""
    if expected is None:
        return 0.0
    told = [
        len(some) for layer in expected for token in layer[half:] for some in (token or {}).values() if some is not None
    ]
    return sum(told) / (neurons * len(expected[0][half:]))


def _neurons_of(experts: Experts, x: Tensor, chosen: Tensor, theta: float, act: str) -> list[Needed]:
    """The neurons of the chosen experts whose |act(W1 · x)| exceeds θ, for each token."""
    found: list[dict[int, Int64[np.ndarray, " neurons"]]] = [{} for _ in x]
    for expert, used in enumerate(chosen.T):
        at = torch.where(used)[0]
        masks = predict_neurons(x[at], experts, expert, act, theta).cpu().numpy()
        for token, mask in zip(at.tolist(), masks, strict=True):
            found[token][expert] = np.flatnonzero(mask)
    return list(found)


def _policy(name: str, needed: Sequence[Int64[np.ndarray, " needed"]], experts: int) -> Callable[..., Residency]:
    """A policy by its name for the cache of a layer; the static profile is that of the first half of these tokens."""
    if name not in RESIDENCIES:
        raise unknown("residency policy", name, RESIDENCIES)
    seen = np.bincount(np.concatenate(needed[: len(needed) // 2]), minlength=experts).astype(float)
    more = {"static": {"frequency": seen}, "belady": {"future": needed}, "window": {"tokens": 5}}
    return partial(RESIDENCIES[name], **more.get(name, {}))


def _global_policy(name: str, layers: int, units: int, rows: int, needed: Sequence) -> Residency:
    if name == "least_stale":
        return LeastStale(units, rows, layers=layers)
    return _policy(name, needed, units)(units, rows=rows)


def _tokens(trace: Trace) -> list[list[Int64[np.ndarray, " needed"]]]:
    return [units_of(trace.active(layer)[0].numpy()) for layer in range(trace.layers)]


def _widest(trace: Trace) -> int:
    return max(len(needed) for layer in _tokens(trace) for needed in layer)
