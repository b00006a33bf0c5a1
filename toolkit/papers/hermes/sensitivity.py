"""Which conclusions of HERMES hold on every set of numbers that fits its 13.75 tokens a second."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from toolkit.papers.hermes.systems import HIGH_END, SystemCase, fitted_sets, run

STEADY = 0.95  # of the speed with the most multipliers
BATCHES = (1, 2, 4, 16)
Speeds = Mapping[SystemCase, float]


def first_steady(speed: pd.Series) -> int:
    """The first of the rising numbers of multipliers from which on the speed is at least `STEADY` of the last one's."""
    enough = (speed >= STEADY * speed.iloc[-1])[::-1].cummin()[::-1]
    return int(speed.index[enough.to_numpy().argmax()])


def _case(system: str, batch: int = 1, **others: object) -> SystemCase:
    return SystemCase("llama2-70b", system, batch, **others)


def _gap(speeds: Speeds, batch: int) -> float:
    return speeds[_case("hermes", batch)] / speeds[_case("hermes_base", batch)]


CONCLUSIONS: dict[str, tuple[Sequence[SystemCase], Callable[[Speeds], bool]]] = {
    "Hermes is faster than Hermes-host and Hermes-base": (
        [_case(system) for system in ("hermes", "hermes_host", "hermes_base")],
        lambda speeds: speeds[_case("hermes")] > max(speeds[_case("hermes_host")], speeds[_case("hermes_base")]),
    ),
    "Hermes is more than 10 times as fast as Deja Vu": (
        [_case("hermes"), _case("deja_vu")],
        lambda speeds: speeds[_case("hermes")] > 10 * speeds[_case("deja_vu")],
    ),
    "Hermes-base comes nearest at batch 2": (
        [_case(system, batch) for system in ("hermes", "hermes_base") for batch in BATCHES],
        lambda speeds: min(BATCHES, key=lambda batch: _gap(speeds, batch)) == 2,
    ),
    "16 DIMMs bring at most 1.2 times the speed of 8": (
        [_case("hermes"), _case("hermes", dimms=16)],
        lambda speeds: speeds[_case("hermes", dimms=16)] < 1.2 * speeds[_case("hermes")],
    ),
    "64 multipliers suffice for OPT-13B and one sequence": (
        [SystemCase("opt-13b", "hermes", multipliers=count) for count in (64, 256)],
        lambda speeds: _ratio_of_multipliers(speeds) >= STEADY,
    ),
    "Hermes reaches most of five A100's speed with one sequence, and less than half with 16": (
        [_case("hermes", batch) for batch in (1, 16)]
        + [_case("tensorrt", batch, machine=HIGH_END) for batch in (1, 16)],
        lambda speeds: _of_gpus(speeds, 16) < 0.5 < _of_gpus(speeds, 1),
    ),
}


def conclusions(sampled_tokens: int, sampled_layers: int, seed: int) -> pd.DataFrame:
    """On how many of the sets that fit each conclusion holds. Columns: conclusion, holds_on, sets, evidence."""
    sample = {"sampled_tokens": sampled_tokens, "sampled_layers": sampled_layers, "seed": seed}
    sets = fitted_sets(**sample)
    cases = list(dict.fromkeys(case for needed, _ in CONCLUSIONS.values() for case in needed))
    speeds = [{case: run(case, chosen, **sample).tokens_per_s for case in cases} for chosen in sets]
    rows = [(text, sum(holds(each) for each in speeds), len(sets)) for text, (_, holds) in CONCLUSIONS.items()]
    return pd.DataFrame(rows, columns=["conclusion", "holds_on", "sets"]).assign(evidence="modelled")


def _ratio_of_multipliers(speeds: Speeds) -> float:
    few, many = (speeds[SystemCase("opt-13b", "hermes", multipliers=count)] for count in (64, 256))
    return few / many


def _of_gpus(speeds: Speeds, batch: int) -> float:
    return speeds[_case("hermes", batch)] / speeds[_case("tensorrt", batch, machine=HIGH_END)]
