"""A machine's time for operations, layers and passes, as tables with one row per stage.

    machine = profile("endor-rtx4080")
    operation_table(machine, Workload("opt-66b"), ops=["fc1"])
    layer_table(machine, Workload("llama2-70b"))
    pass_table(machine, Workload("opt-66b"), {"published": LayerMap(5, 8, 51)})

All tables have the columns of `LABELS` that apply, those of `Timeline.stages()`, those of `beside_dense`, and the range
that the profile's own ranges give: seconds_low and seconds_high of seconds, speedup_low and speedup_high,
time_over_dense_low and time_over_dense_high. `choices` are the ways to predict, `all_ways()` if none
is given. On a machine without a GPU: `all_ways(device="cpu")`, and no layer in device memory.

A profile gives some numbers with a low and a high end. The cost model runs once at every corner: each of those numbers
at one of its two ends. The least and the most over the corners are the range of a prediction. A ratio takes both of
its times from the same corner, since one machine has one number: a rate of decoding that is low is low for all.

The corners are enough for this reason. Every step takes a fixed time and its bytes over a rate, so its seconds are
monotonic in each number. A timeline starts a step at the latest end of what it waits for. Both a sum and a maximum rise
with each of their parts, so the total of a pass, sequential or pipelined, is least and most at corners. One after the
other, a total is linear in each fixed time and in each inverse rate; the ratio of two such totals rises or falls with
each of them, so it is least and most at corners, too. This is not proved for ratios of pipelined totals, nor for a
pipelined pass's `transfer`, in which reads and copies overlap.

A range is an outer bound for numbers that are anywhere within their ranges, together. It is no confidence interval: no
number's range says how likely its ends are, and numbers without a range count as exact.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain, product

import numpy as np
import pandas as pd

from toolkit.evidence.stage_tables import DENSE, LABELS, beside_dense, relative_to
from toolkit.machines.machine import Profile
from toolkit.models.workload import Workload
from toolkit.offload.placement import LayerMap
from toolkit.offload.ways import Way, all_ways
from toolkit.papers.endor.cost_model import PlacedLayer, Weight, predict, weights
from toolkit.timeline import Timeline


@dataclass(frozen=True)
class Case:
    """One timeline of a table: a machine's layers, the way to run them, and the labels that tell it from others."""

    layers: Callable[[Profile], Sequence[PlacedLayer]]
    way: Way
    labels: Mapping[str, object]


def layer_of(workload: Workload, machine: Profile, method: str, placement: str) -> PlacedLayer:
    """A whole decoder layer of a workload, stored as a method stores it."""
    stored = weights(workload.shapes(), method, workload.dtype, workload.sparsity)
    return PlacedLayer(stored, placement, machine.rest_s(_dense_bytes(stored)))


def _dense_bytes(stored: Iterable[Weight]) -> int:
    return sum(weight.dense_bytes for weight in stored)


def operation_table(
    machine: Profile,
    workload: Workload,
    ops: Sequence[str] = (),
    placements: Iterable[str] = ("storage",),
    choices: Sequence[Way] = (),
) -> pd.DataFrame:
    """Linear operations (all of a layer, if none is named), each by itself, and without the layer's overhead.

    Raises `UserError` for an unknown operation, or a number that the machine's profile lacks.
    """
    cases = [
        Case(_layers(workload, way, [placement], op), way, {"op": op, "placement": placement})
        for placement in placements
        for op in workload.shapes(ops)
        for way in choices or all_ways()
    ]
    return _table(machine, workload, cases)


def layer_table(
    machine: Profile, workload: Workload, placements: Iterable[str] = (), choices: Sequence[Way] = ()
) -> pd.DataFrame:
    """One decoder layer (op "layer") in each of the machine's tiers, or in those named.

    Raises `UserError` for a number that the machine's profile lacks.
    """
    cases = [
        Case(_layers(workload, way, [placement]), way, {"op": "layer", "placement": placement})
        for placement in placements or machine.tiers
        for way in choices or all_ways()
    ]
    return _table(machine, workload, cases)


def pass_table(
    machine: Profile, workload: Workload, maps: Mapping[str, LayerMap], choices: Sequence[Way] = ()
) -> pd.DataFrame:
    """One pass through all layers of a model (op "pass"), for each named way to place them (`mapping`).

    The map `published` is that of the dense model: speed-ups are over dense weights placed so, and one more map,
    `refilled`, takes its bytes (`LayerMap.refilled`). Columns more: dram_layers, storage_layers, and speedup_over_host
    for the direct path.
    """
    cases = list(_passes(machine, workload, maps, choices or all_ways()))
    table = _table(machine, workload, cases, mapping="published")
    return table.assign(speedup_over_host=1 / relative_to(table, "seconds", path="host"))


def _layers(
    workload: Workload, way: Way, tiers: Sequence[str], op: str | None = None
) -> Callable[[Profile], Sequence[PlacedLayer]]:
    """A layer in each of these tiers, with the machine's overhead; or one of its operations, without."""
    stored = weights(workload.shapes([op] if op else []), way.method, workload.dtype, workload.sparsity)
    whole_bytes = 0 if op else _dense_bytes(stored)
    return lambda machine: [
        PlacedLayer(stored, tier, machine.rest_s(whole_bytes) if whole_bytes else 0.0) for tier in tiers
    ]


def _passes(
    machine: Profile, workload: Workload, maps: Mapping[str, LayerMap], choices: Sequence[Way]
) -> Iterator[Case]:
    for way in choices:
        in_dram = layer_of(workload, machine, way.method, "dram").weights
        sizes = [sum(weight.nbytes(form) for weight in in_dram) for form in ("dense", "stored")]
        for mapping, where in (maps | {"refilled": maps["published"].refilled(*sizes)}).items():
            counts = {"dram_layers": where.dram, "storage_layers": where.storage}
            labels = {"op": "pass", "mapping": mapping, **counts}
            yield Case(_layers(workload, way, where.tiers), way, labels)


def _table(machine: Profile, workload: Workload, cases: Sequence[Case], **baseline: str) -> pd.DataFrame:
    shared = {"profile": machine.id} | asdict(workload)
    matter = [numbers_that_matter(machine, case.layers, case.way) for case in cases]

    @cache
    def stages(number: int, changed: tuple[tuple[str, float], ...] = ()) -> pd.DataFrame:
        case, other = cases[number], machine.with_values(dict(changed))
        return predict(other, case.layers(other), case.way).stages()

    def at(corner: Mapping[str, float]) -> pd.DataFrame:
        changed = [tuple((name, corner[name]) for name in names) for names in matter]
        tables = [stages(number, values) for number, values in enumerate(changed)]
        return table.assign(seconds=np.concatenate([each["seconds"] for each in tables]))

    rows = [stages(number).assign(**shared, **asdict(case.way), **case.labels) for number, case in enumerate(cases)]
    table = beside_dense(pd.concat(rows, ignore_index=True), **baseline)
    first = [label for label in LABELS if label in table]
    table = table[[*first, *table.columns.drop(first)]]
    tables = [table, *(at(corner) for corner in corners(machine, dict.fromkeys(chain(*matter))))]
    over_dense = np.stack([relative_to(each, "seconds", **DENSE | baseline) for each in tables])
    with np.errstate(divide="ignore"):
        values = {"seconds": np.stack([each["seconds"] for each in tables]), "speedup": 1 / over_dense}
    for column, each in (values | {"time_over_dense": over_dense}).items():
        least, most = each.min(axis=0), each.max(axis=0)  # NaN where no number with a range matters
        table[f"{column}_low"] = np.where(least < most, least, np.nan)
        table[f"{column}_high"] = np.where(least < most, most, np.nan)
    return table


def numbers_that_matter(machine: Profile, layers: Callable[[Profile], Iterable[PlacedLayer]], way: Way) -> list[str]:
    """The names of the numbers with a range that the times of a machine's layers depend on, each layer by itself."""

    def alone(other: Profile) -> list[Timeline]:
        return [predict(other, [layer], way) for layer in dict.fromkeys(layers(other))]

    expected = alone(machine)
    return [
        name
        for name, ends in machine.ranges().items()
        if any(alone(machine.with_values({name: end})) != expected for end in ends)
    ]


def corners(machine: Profile, names: Iterable[str]) -> list[dict[str, float]]:
    """Every way to put each of these numbers at one of its ends: 2 to the power of their count."""
    ranges = machine.ranges()
    names = list(names)
    return [dict(zip(names, ends, strict=True)) for ends in product(*(ranges[name] for name in names))]
