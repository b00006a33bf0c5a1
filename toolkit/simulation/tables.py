"""What a machine would take for operations, layers and passes, as tables with a row a stage.

    machine = profile("endor-rtx4080")
    operation_table(machine, Workload("opt-66b"), ops=["fc1"])
    layer_table(machine, Workload("llama2-70b"))
    pass_table(machine, Workload("opt-66b"), {"published": LayerMap(5, 8, 51)})

All tables have the columns of `LABELS` that apply, those of `Timeline.stages()` and those of `beside_dense`. `choices`
are the ways to predict, `all_ways()` if none is given. On a machine without a GPU: `all_ways(device="cpu")`, and no
layer in device memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

import pandas as pd

from toolkit.machines.machine import Profile
from toolkit.models.workload import Workload
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way, all_ways
from toolkit.simulation.cost_model import Layer, predict, weights
from toolkit.timeline.spans import TIERS, Timeline
from toolkit.timeline.tables import LABELS, beside_dense, relative_to


def layer_of(workload: Workload, machine: Profile, method: str, placement: str) -> Layer:
    """A whole decoder layer of a workload, stored as a method stores it."""
    overhead_s = machine.software.layer_s if machine.software else 0.0
    return Layer(weights(workload.shapes(), method, workload.dtype, workload.sparsity), placement, overhead_s)


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
    chosen = workload.shapes(ops)
    return _table(
        machine,
        workload,
        (
            (predict(machine, [Layer((weight,), placement)], way), way, {"op": weight.op, "placement": placement})
            for placement in placements
            for op, shape in chosen.items()
            for way in choices or all_ways()
            for weight in weights({op: shape}, way.method, workload.dtype, workload.sparsity)
        ),
    )


def layer_table(
    machine: Profile, workload: Workload, placements: Iterable[str] = TIERS, choices: Sequence[Way] = ()
) -> pd.DataFrame:
    """One decoder layer (op "layer") in each tier. Raises `UserError` for a number that the machine's profile lacks."""
    cases = (
        (
            predict(machine, [layer_of(workload, machine, way.method, placement)], way),
            way,
            {"op": "layer", "placement": placement},
        )
        for placement in placements
        for way in choices or all_ways()
    )
    return _table(machine, workload, cases)


def pass_table(
    machine: Profile, workload: Workload, maps: Mapping[str, LayerMap], choices: Sequence[Way] = ()
) -> pd.DataFrame:
    """One pass through all layers (op "pass"), for each named way to place them (`mapping`).

    The map `published` is that of the dense model: speed-ups are over dense weights placed so, and one more map,
    `refilled`, takes its bytes (`LayerMap.refilled`). Columns more: dram_layers, storage_layers, and speedup_over_host
    for the direct path.
    """
    passes = _passes(machine, workload, maps, choices or all_ways())
    table = _table(machine, workload, passes, mapping="published")
    return table.assign(speedup_over_host=1 / relative_to(table, "seconds", path="host"))


def _passes(
    machine: Profile, workload: Workload, maps: Mapping[str, LayerMap], choices: Sequence[Way]
) -> Iterator[tuple[Timeline, Way, dict]]:
    for way in choices:
        layers = {tier: layer_of(workload, machine, way.method, tier) for tier in TIERS}
        sizes = [sum(w.nbytes(form) for w in layers["dram"].weights) for form in ("dense", "stored")]
        for mapping, where in (maps | {"refilled": maps["published"].refilled(*sizes)}).items():
            timeline = predict(machine, [layers[tier] for tier in where.tiers], way)
            counts = {"dram_layers": where.dram, "storage_layers": where.storage}
            yield timeline, way, {"op": "pass", "mapping": mapping, **counts}


def _table(
    machine: Profile, workload: Workload, cases: Iterable[tuple[Timeline, Way, dict]], **baseline: str
) -> pd.DataFrame:
    shared = {"profile": machine.id} | asdict(workload)
    rows = [timeline.stages().assign(**shared, **asdict(way), **labels) for timeline, way, labels in cases]
    table = beside_dense(pd.concat(rows, ignore_index=True), **baseline)
    first = [label for label in LABELS if label in table]
    return table[[*first, *table.columns.drop(first)]]
