"""A machine's time for operations, layers and passes, as tables with one row per stage.

    machine = profile("endor-rtx4080")
    operation_table(machine, Workload("opt-66b"), ops=["fc1"])
    layer_table(machine, Workload("llama2-70b"))
    pass_table(machine, Workload("opt-66b"), {"published": LayerMap(5, 8, 51)})

All tables have the columns of `LABELS` that apply, those of `Timeline.stages()`, those of `beside_dense`, and the range
that the profile's own ranges give (`toolkit.simulation.ranges`): seconds_low and seconds_high of seconds, speedup_low
and speedup_high, time_over_dense_low and time_over_dense_high. `choices` are the ways to predict, `all_ways()` if none
is given. On a machine without a GPU: `all_ways(device="cpu")`, and no layer in device memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain

import numpy as np
import pandas as pd

from toolkit.machines.machine import Profile
from toolkit.models.workload import Workload
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way, all_ways
from toolkit.simulation.cost_model import PlacedLayer, predict, weights
from toolkit.simulation.ranges import corners, numbers_that_matter, with_ranges
from toolkit.timeline.tables import DENSE, LABELS, beside_dense, relative_to


@dataclass(frozen=True)
class Case:
    """One timeline of a table: a machine's layers, the way to run them, and the labels that tell it from others."""

    layers: Callable[[Profile], Sequence[PlacedLayer]]
    way: Way
    labels: Mapping[str, object]


def layer_of(workload: Workload, machine: Profile, method: str, placement: str) -> PlacedLayer:
    """A whole decoder layer of a workload, stored as a method stores it."""
    stored = weights(workload.shapes(), method, workload.dtype, workload.sparsity)
    return PlacedLayer(stored, placement, _overhead_s(machine))


def _overhead_s(machine: Profile) -> float:
    return machine.software.layer_s if machine.software else 0.0


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
        Case(_single(workload, op, way, placement), way, {"op": op, "placement": placement})
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
        Case(_whole(workload, way, [placement]), way, {"op": "layer", "placement": placement})
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


def _single(workload: Workload, op: str, way: Way, placement: str) -> Callable[[Profile], Sequence[PlacedLayer]]:
    stored = weights(workload.shapes([op]), way.method, workload.dtype, workload.sparsity)
    return lambda machine: [PlacedLayer(stored, placement)]


def _whole(workload: Workload, way: Way, tiers: Sequence[str]) -> Callable[[Profile], Sequence[PlacedLayer]]:
    stored = weights(workload.shapes(), way.method, workload.dtype, workload.sparsity)
    return lambda machine: [PlacedLayer(stored, tier, _overhead_s(machine)) for tier in tiers]


def _passes(
    machine: Profile, workload: Workload, maps: Mapping[str, LayerMap], choices: Sequence[Way]
) -> Iterator[Case]:
    for way in choices:
        in_dram = layer_of(workload, machine, way.method, "dram").weights
        sizes = [sum(weight.nbytes(form) for weight in in_dram) for form in ("dense", "stored")]
        for mapping, where in (maps | {"refilled": maps["published"].refilled(*sizes)}).items():
            counts = {"dram_layers": where.dram, "storage_layers": where.storage}
            labels = {"op": "pass", "mapping": mapping, **counts}
            yield Case(_whole(workload, way, where.tiers), way, labels)


def _table(machine: Profile, workload: Workload, cases: Sequence[Case], **baseline: str) -> pd.DataFrame:
    shared = {"profile": machine.id} | asdict(workload)
    matter = [numbers_that_matter(machine, case.layers, case.way) for case in cases]

    @cache
    def stages(number: int, changed: tuple[tuple[str, float], ...] = ()) -> pd.DataFrame:
        case, other = cases[number], machine.with_values(dict(changed))
        return predict(other, case.layers(other), case.way).stages()

    def seconds_at(corner: Mapping[str, float]) -> np.ndarray:
        changed = [tuple((name, corner[name]) for name in names) for names in matter]
        return np.concatenate([stages(number, values)["seconds"] for number, values in enumerate(changed)])

    rows = [stages(number).assign(**shared, **asdict(case.way), **case.labels) for number, case in enumerate(cases)]
    table = beside_dense(pd.concat(rows, ignore_index=True), **baseline)
    numbered = table.assign(row=np.arange(1.0, len(table) + 1))
    dense_row = (numbered["row"] / relative_to(numbered, "row", **DENSE, **baseline)).round() - 1
    ranged = with_ranges(table.assign(dense_row=dense_row), seconds_at, corners(machine, dict.fromkeys(chain(*matter))))
    first = [label for label in LABELS if label in table]
    return ranged[[*first, *ranged.columns.drop(first)]]
