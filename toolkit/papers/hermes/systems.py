"""Tokens a second of HERMES and its rivals (figures 1, 9 to 17), from one set of assumptions for all figures.

    table = systems_table([SystemCase("llama2-70b", "hermes"), SystemCase("llama2-70b", "hermes_base", batch=2)])

The set was fitted to few published numbers, which are inputs: `data/hardware/hermes.yaml` names them. A line of other
sets fits them as well, from few active neurons and slow DIMMs to many and fast ones. The tables give the least and the
most along this line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pandas as pd

from toolkit.cache import kept
from toolkit.machines.hardware import profile
from toolkit.machines.machine import MULTIPLIERS, Profile
from toolkit.machines.null_model import links_only
from toolkit.papers.hermes.loads import ABLATION, ATTENTION, FFN, PROJECTION, SYSTEMS, Serving
from toolkit.papers.hermes.tokens import COPY, HEAD, ServingTimes, generate

MACHINE, HIGH_END = "hermes-rtx4090", "hermes-5a100"
ACTIVE = (0.12, 0.2, 0.3)  # of the sets that fit; the first is the default
PARTS = {
    COPY: "copy_ms",
    ATTENTION: "attention_neurons_ms",
    "attention": "attention_ms",
    PROJECTION: "projection_ms",
    FFN: "ffn_neurons_ms",
    "predictor": "predictor_ms",
    "barriers": "barriers_ms",
    HEAD: "head_ms",
}
BUSY = {"GPU": "gpu_ms", "DIMM 0": "dimm_ms"}  # DIMMs are alike but for chance
COLOURS = {  # the same in every figure
    **{"accelerate": "C4", "flexgen": "C0", "deja_vu": "C1", "sparse_offload": "C5"},
    **{"hermes_host": "C9", "hermes_base": "C2", "hermes": "C3"},
}
TOKENS = 24  # drawn, of those generated
RANGED = ("tokens_per_s", "token_ms", "prefill_percent")


@dataclass(frozen=True)
class SystemCase:
    """A model on a system: a name of `SYSTEMS` or `ABLATION`; with None a machine keeps its own number of DIMMs."""

    model: str
    system: str
    batch: int = 1
    machine: str = MACHINE
    dimms: int | None = None
    multipliers: int = MULTIPLIERS


@dataclass(frozen=True)
class FittedSet:
    """Numbers that bring LLaMA2-70B to the same tokens a second: share of active neurons, GB/s of a DIMM."""

    active: float
    bandwidth_gb_s: float

    def on(self, machine: Profile) -> Profile:
        """The machine with this bandwidth, and as many multiply-adds for each byte as its profile has."""
        if machine.near_data is None:
            return machine
        own = machine.near_data
        tflop_s = own.tflop_s * self.bandwidth_gb_s / own.bandwidth_gb_s
        return machine.with_values({"near_data.bandwidth_gb_s": self.bandwidth_gb_s, "near_data.tflop_s": tflop_s})


def systems_table(
    cases: Sequence[SystemCase], sampled_tokens: int = TOKENS, sampled_layers: int = 2, seed: int = 0
) -> pd.DataFrame:
    """A row for each case, by the default set, with the range along the sets that fit as well; kept.

    Columns: part, model, system, batch, dimms, multipliers; tokens_per_s, token_ms, prefill_s, prefill_percent (of the
    whole time); the parts of a token in ms; low and high of `RANGED`; evidence, profile.
    """
    sample = sampled_tokens, sampled_layers, seed
    tables = [
        pd.concat([_row(case, chosen, *sample) for case in cases], ignore_index=True) for chosen in fitted_sets(*sample)
    ]
    ends = {}
    for column in RANGED:
        values = pd.concat([table[column] for table in tables], axis=1)
        ends |= {f"{column}_low": values.min(axis=1), f"{column}_high": values.max(axis=1)}
    return tables[0].assign(part="systems", **ends)


def null_table(cases: Sequence[SystemCase], sampled_tokens: int, sampled_layers: int, seed: int) -> pd.DataFrame:
    """The rows of `systems_table` by the null model, for systems that bring weights over PCIe."""
    sample = sampled_tokens, sampled_layers, seed
    default = fitted_sets(*sample)[0]
    return pd.concat([_row(case, default, *sample, null=True) for case in cases], ignore_index=True)


@lru_cache
def fitted_sets(sampled_tokens: int = TOKENS, sampled_layers: int = 2, seed: int = 0) -> tuple[FittedSet, ...]:
    """The default set first, then those that give LLaMA2-70B as many tokens a second with more active neurons."""
    return tuple(FittedSet(*row) for row in _ridge(sampled_tokens, sampled_layers, seed).itertuples(index=False))


@kept("hermes_ridge")
def _ridge(sampled_tokens: int, sampled_layers: int, seed: int) -> pd.DataFrame:
    sample = {"sampled_tokens": sampled_tokens, "sampled_layers": sampled_layers, "seed": seed}
    default = FittedSet(ACTIVE[0], profile(MACHINE).near_data.bandwidth_gb_s)
    case = SystemCase("llama2-70b", "hermes")
    wanted = serving_times(case, default, **sample).tokens_per_s
    sets = [default]
    for active in ACTIVE[1:]:
        low, high = default.bandwidth_gb_s, 1000.0
        while high / low > 1.01:
            middle = (low * high) ** 0.5
            reached = serving_times(case, FittedSet(active, middle), **sample).tokens_per_s
            low, high = (low, middle) if reached > wanted else (middle, high)
        sets.append(FittedSet(active, high))
    return pd.DataFrame(sets)


def serving_times(case: SystemCase, chosen: FittedSet, null: bool = False, **sample: int) -> ServingTimes:
    """One case with one of the sets that fit; by the `null` model, only links and DIMMs take time."""
    machine = chosen.on(links_only(profile(case.machine)) if null else profile(case.machine))
    if near := machine.near_data:
        near = near.with_multipliers(case.multipliers)
        machine = replace(machine, near_data=replace(near, dimms=near.dimms if case.dimms is None else case.dimms))
    serving = Serving(case.model, batch=case.batch, active=chosen.active, **sample)
    return generate(machine, serving, (SYSTEMS | ABLATION)[case.system])


@kept("hermes_cases")
def _row(
    case: SystemCase, chosen: FittedSet, sampled_tokens: int, sampled_layers: int, seed: int, null: bool = False
) -> pd.DataFrame:
    sample = {"sampled_tokens": sampled_tokens, "sampled_layers": sampled_layers, "seed": seed}
    found = serving_times(case, chosen, null, **sample)
    own = profile(case.machine).near_data
    dimms = case.dimms if case.dimms is not None else int(own.dimms) if own else 0
    labels = {"model": case.model, "system": case.system, "batch": case.batch, "profile": case.machine, "dimms": dimms}
    speeds = {"tokens_per_s": found.tokens_per_s, "token_ms": 1e3 * found.token_s, "prefill_s": found.prefill_s}
    parts = {column: 1e3 * found.parts.get(part, 0.0) for part, column in PARTS.items()}
    parts |= {column: 1e3 * found.busy.get(resource, 0.0) for resource, column in BUSY.items()}
    share = {"prefill_percent": 100 * found.prefill_s / found.total_s}
    row = labels | {"multipliers": case.multipliers} | speeds | share | parts | {"evidence": "modelled"}
    return pd.DataFrame([row])


def shares(table: pd.DataFrame) -> pd.DataFrame:
    """The shares of the parts in the time of each case of `systems_table`, in percent.

    Columns: model, system, batch, copy_percent (what PCIe adds, of a token), predictor_percent (of a token without
    copies), dimm_percent (of the neurons' and projections' time, where DIMMs compute them), prefill_percent and
    generation_percent (of the whole time); evidence, profile.
    """
    computed = table["token_ms"] - table["copy_ms"]
    parts = {
        "copy_percent": 100 * table["copy_ms"] / table["token_ms"],
        "predictor_percent": 100 * table["predictor_ms"] / computed,
        "dimm_percent": 100 * table["dimm_ms"] / (table["dimm_ms"] + table["gpu_ms"]),
        "prefill_percent": table["prefill_percent"],
        "generation_percent": 100 - table["prefill_percent"],
    }
    return table[["model", "system", "batch", "profile", "evidence"]].assign(part="shares", **parts)
