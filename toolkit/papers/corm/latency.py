"""Times of a token by schedulings of loading experts (CORM, figures 7 and 8, tables 1, 3 and 4).

    latency_table(["mixtral-8x7b"], BREAKDOWN)

Quantities that the paper leaves open have a default and a range (`toolkit.papers.corm.cost_model.RANGES`). The tables
give the least and the most over all corners: each open input that a scheduling depends on at one of its two ends.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pandas as pd

from toolkit.machines.hardware import profile
from toolkit.machines.machine import Profile
from toolkit.machines.null_model import links_only
from toolkit.models.architectures import ARCHITECTURES
from toolkit.papers.corm.cost_model import (
    CORM,
    DEFAULTS,
    LOADING,
    ON_DEMAND,
    PREDICTOR,
    RANGES,
    RIVALS,
    LoadingInputs,
    Scheduling,
    beside_s,
    slots_that_fit,
    token,
    token_loads,
)
from toolkit.papers.corm.routing import RoutedModel, own_policies, policy_table
from toolkit.sparsity.route_traces import ROUTE_TRACES, load_route_trace
from toolkit.timeline import Timeline

MACHINE = "corm-rtx3090ti"
OFFLOAD = RIVALS["mixtral-offload"]
BYTES_ALONE = replace(DEFAULTS, limit=1.0)  # for the null model: gathering takes no time
OWN_ROUTING = RoutedModel("smollm2-135m-moe-upcycled")


@cache
def ends(model: str) -> dict[str, tuple]:
    """Both ends of each open input, the default or the nearest to it first; slots up to what fits the GPU."""
    shape = ARCHITECTURES[model]
    fitting = slots_that_fit(shape, machine(), ON_DEMAND)
    switches = {"fixed_scales": (True, False), "gathers_beside": (False, True)}
    return RANGES | {"slots": (shape.experts_per_token, fitting)} | switches


@cache
def matters(model: str, scheduling: Scheduling, name: str) -> bool:
    """Whether a scheduling's time depends on an open input, all others at their defaults."""
    return len({timeline(model, scheduling, replace(DEFAULTS, **{name: end})).total_s for end in ends(model)[name]}) > 1


def corners(model: str, schedulings: Iterable[Scheduling]) -> list[LoadingInputs]:
    """Each choice that puts each open input, on which one of the schedulings depends, at one of its ends."""
    schedulings = list(schedulings)
    chosen = {
        name: pair
        for name, pair in ends(model).items()
        if any(matters(model, scheduling, name) for scheduling in schedulings)
    }
    return [replace(DEFAULTS, **dict(zip(chosen, values, strict=True))) for values in product(*chosen.values())]


def latency_table(models: Sequence[str], schedulings: Mapping[str, Scheduling], null: bool = False) -> pd.DataFrame:
    """A row for each model and way: one token in the steady state; by the `null` model, bytes over the link alone.

    Columns: part "latency", model, way, token_ms, loading_ms, compute_ms, overlap_ms, predictor_ms, predictor_percent;
    speedup over experts on demand with its low and high; hits and bytes; evidence, profile.
    """
    inputs = BYTES_ALONE if null else DEFAULTS
    rows = []
    for model, scheduling in product(models, schedulings.values()):
        base_s = timeline(model, ON_DEMAND, inputs, null).total_s
        over = [base_s / seconds(model, corner, scheduling) for corner in corners(model, [scheduling])]
        spread = {} if null else {"speedup_low": min(over), "speedup_high": max(over)}
        rows.append(token_row(model, scheduling, inputs, null) | spread)
    return pd.DataFrame(rows).assign(part="latency", evidence="modelled", profile=MACHINE)


def routed_table(models: Sequence[str], schedulings: Iterable[Scheduling] = (CORM, OFFLOAD)) -> pd.DataFrame:
    """`latency_table` of schedulings with a cache, by the hit rates of real routing instead of chance, without ranges.

    Routing is that of `real_hits`, of other models, with slots for the same share of a layer's experts. Columns: part
    "routed", routing (the trace's model), and those of `latency_table`.
    """
    rows = []
    for model in models:
        shape = ARCHITECTURES[model]
        for found, scheduling in product(
            real_hits([shape.experts_per_token / shape.experts]).itertuples(), schedulings
        ):
            inputs = replace(DEFAULTS, hit_rate=found.expert_hits)
            rows.append(token_row(model, scheduling, inputs) | {"routing": found.model})
    return pd.DataFrame(rows).assign(part="routed", evidence="modelled", profile=MACHINE)


def token_row(model: str, scheduling: Scheduling, inputs: LoadingInputs, null: bool = False) -> dict[str, str | float]:
    """One token's times and bytes, and its speed over experts on demand: `latency_table` has the columns."""
    shape, found = ARCHITECTURES[model], timeline(model, scheduling, inputs, null)
    base_s = timeline(model, ON_DEMAND, inputs, null).total_s
    predicting_s = sum(span.seconds for span in found.spans if span.op == PREDICTOR)
    uses, routed, missed = token_loads(shape, scheduling, inputs), shape.routed_layers, 1 - inputs.accuracy
    loaded_mb = sum(span.nbytes for span in found.spans if span.stage == "copy") / 1e6
    ahead = (routed - 1) / (routed + (routed - 1) * missed * scheduling.exact) if scheduling.prefetch else 0.0
    return {
        "model": model,
        "way": scheduling.name,
        "token_ms": 1e3 * found.total_s,
        "loading_ms": 1e3 * found.busy_s(*LOADING),
        "compute_ms": 1e3 * found.busy_s("compute"),
        "overlap_ms": 1e3 * beside_s(found),
        "predictor_ms": 1e3 * predicting_s,
        "predictor_percent": 100 * predicting_s / found.total_s if found.total_s else 0.0,
        "loaded_mb": loaded_mb,
        "expert_hits": uses.hits,
        "neuron_hits": inputs.neuron_hits(shape) if scheduling.cached and scheduling.sparse else uses.hits,
        "prefetched_mb": ahead * loaded_mb,
        "wasted_mb": missed * ahead * loaded_mb,  # loaded and not needed
        "predicted": inputs.active if scheduling.prefetch and scheduling.sparse else float(scheduling.prefetch),
        "speedup": base_s / found.total_s if found.total_s else math.inf,  # by the null model, where nothing is loaded
    }


def timeline(model: str, scheduling: Scheduling, inputs: LoadingInputs = DEFAULTS, null: bool = False) -> Timeline:
    """One token's timeline on the paper's machine."""
    return token(ARCHITECTURES[model], scheduling, machine(null), inputs)


def seconds(model: str, inputs: LoadingInputs, scheduling: Scheduling) -> float:
    """The counts of one token. Inputs that it ignores are set to their defaults first, so few are computed."""
    needed = {name: getattr(inputs, name) for name in ends(model) if matters(model, scheduling, name)}
    return _seconds(model, scheduling, replace(DEFAULTS, hit_rate=inputs.hit_rate, **needed))


@cache
def _seconds(model: str, scheduling: Scheduling, inputs: LoadingInputs) -> float:
    return timeline(model, scheduling, inputs).total_s


@cache
def machine(null: bool = False) -> Profile:
    """The paper's machine; of the `null` model, its links alone take time."""
    return links_only(profile(MACHINE)) if null else profile(MACHINE)


@cache
def _hits(share: float) -> pd.DataFrame:
    ours = own_policies(OWN_ROUTING, [share], ["lru"]).assign(model=OWN_ROUTING.model)
    tables = [policy_table(load_route_trace(name), [share], ["lru"]).assign(model=name) for name in ROUTE_TRACES]
    found = pd.concat([*tables, ours], ignore_index=True)
    return found[found["slots"] <= (share * found["experts"]).round()]  # others have more: a token's experts


def real_hits(shares: Sequence[float]) -> pd.DataFrame:
    """The hit rate of an LRU cache in real routing, by the share of a layer's experts that it holds.

    Three traces of large models, and our mixture in Mixtral's form where the share holds a token's experts. If experts
    were used alike and tokens were independent, the rate would be that share. Columns: part "hits", model (the
    trace's), memory, slots, experts, expert_hits; evidence.
    """
    found = pd.concat([_hits(share) for share in shares], ignore_index=True)
    return found.assign(part="hits", evidence="measured")
