"""Operations and layers of ENDOR's figures: the paper's machine modelled, this one measured and modelled.

    twin, part = Workload("opt-66b"), Workload("opt-66b/8")
    table, null = operation_times("endor-rtx4080", twin, part, ["fc1"], ["dense", "endor"])

`table` has the rows of `toolkit.papers.endor.tables` for the paper's machine, then those of this one, whose device is
the CPU. Operations of one call are measured in the same turns, so that their times can be compared. Rates
(`toolkit.papers.endor.rates`) are measured apart from what the model predicts. `null` is the null model's table of the
paper's machine (`toolkit.machines.null_model`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from toolkit.evidence.stage_tables import beside_dense, beside_measured, way_names
from toolkit.machines.hardware import profile
from toolkit.machines.machine import THIS_MACHINE
from toolkit.machines.null_model import with_null_model
from toolkit.measure.accelerate import RIVAL
from toolkit.measure.summary import stage_summary
from toolkit.models.workload import Workload
from toolkit.offload.methods import METHODS
from toolkit.offload.ways import Placed, all_ways
from toolkit.papers.endor.operations import PLACEMENTS, labels, measured_spans, spans_of
from toolkit.papers.endor.rates import this_machine
from toolkit.papers.endor.tables import layer_table, operation_table

Tables = tuple[pd.DataFrame, pd.DataFrame]
LAYER_METHODS = ("dense", "endor", "endor_packed")  # ZSTD is left to single operations: it would take most of the time
PLACES = {"storage": "on disk", "dram": "in DRAM", "device": "in the device's memory"}


def operation_times(
    machine: str,
    twin: Workload,
    measured: Workload,
    ops: Sequence[str],
    methods: Sequence[str],
    paths: Sequence[str] = ("host",),
    **measuring: Any,
) -> Tables:
    """Single operations, read from the disk: `twin` on the paper's `machine`, `measured` on this one.

    A bar of the figure (`way`) is an operation, where there are several, and a method. `measuring`: settings of
    `operation_measurements`.
    """
    choices = all_ways(methods=methods, paths=paths)
    modelled, null = with_null_model(operation_table, profile(machine), twin, ops, choices=choices)
    ours = operation_measurements(measured, ops, methods, **measuring)
    table = pd.concat([modelled, ours], ignore_index=True)
    return table.assign(way=way_names(table, *["op"] * (len(ops) > 1))), null


def layer_times(
    machine: str,
    twins: Sequence[Workload],
    measured: Sequence[Workload],
    methods: Sequence[str],
    placements: Sequence[str] = (),
    paths: Sequence[str] = ("host",),
    **measuring: Any,
) -> Tables:
    """Whole decoder layers: `twins` on the paper's `machine`, one operation after the other; `measured` on this one.

    `placements` are the tiers that layers lie in: all that a machine has, unless given. A bar of the figure (`way`) is
    a model or a placement, whichever there are several of, and a method. `measuring`: settings of `layer_measurements`.
    """
    choices = all_ways(methods=methods, paths=paths)
    tables = [with_null_model(layer_table, profile(machine), twin, placements, choices) for twin in twins]
    modelled, null = (pd.concat(each) for each in zip(*tables, strict=True))
    ours = [layer_measurements(workload, methods, placements or PLACEMENTS, **measuring) for workload in measured]
    table = pd.concat([modelled, *ours], ignore_index=True)
    return table.assign(way=way_names(table, "model" if len(twins) > 1 else "placement")), null


def operation_measurements(
    workload: Workload,
    ops: Sequence[str],
    methods: Iterable[str] = tuple(METHODS),
    repetitions: int = 7,
    fresh: bool = False,
    accelerate: bool = False,
) -> pd.DataFrame:
    """Linear operations read from the disk of this machine, as `operation_table` has them, measured and modelled.

    `accelerate` needs a single operation. seconds are medians over the repetitions, with seconds_low and seconds_high.
    `mode` is "direct" if reads went past the page cache. `measured_at` is in UTC. `modelled_over_measured`, in modelled
    rows, is their seconds over the measured ones. Raises `UserError` for unknown names, a disk too small, or bytes read
    back that are not those written.
    """
    choices, rivals = all_ways(device="cpu", methods=methods), [RIVAL] * accelerate
    timed = [*((way, "storage") for way in all_ways(device="cpu")), *rivals]
    wanted, shapes = [*((way, "storage") for way in choices), *rivals], workload.shapes(ops)
    spans = measured_spans(workload, shapes, timed, repetitions, fresh=fresh)  # all operations in the same turns
    tables = [_stages(spans[spans["op"].eq(op) | (len(shapes) == 1)], workload, wanted, op) for op in shapes]
    machine = this_machine(workload.dtype, workload.sparsity, fresh)
    modelled = operation_table(machine, workload, ops, choices=choices)
    return _beside(pd.concat(tables, ignore_index=True), modelled)


def layer_measurements(
    workload: Workload,
    methods: Iterable[str] = LAYER_METHODS,
    placements: Sequence[str] = PLACEMENTS,
    repetitions: int = 5,
    fresh: bool = False,
    policies: Iterable[str] = ("sequential",),
) -> pd.DataFrame:
    """A decoder layer's linears as `layer_table` has them, measured and modelled; see `operation_measurements`.

    `methods` are of `LAYER_METHODS`. The policy "pipelined" is measured for layers in storage only.
    """
    choices = all_ways(policies, "cpu", methods)
    spans = measured_spans(workload, workload.shapes(), layer_ways(), repetitions, fresh=fresh)
    wanted = [(way, placement) for placement in placements for way in choices if (way, placement) in layer_ways()]
    machine = this_machine(workload.dtype, workload.sparsity, fresh)
    modelled = layer_table(machine, workload, placements, choices)
    return _beside(_stages(spans, workload, wanted, "layer"), modelled)


def times_by_machine(table: pd.DataFrame) -> pd.DataFrame:
    """Seconds to look at: a row for each machine, way and kind of evidence, a column for each stage."""
    return table.pivot_table(index=["profile", "way", "evidence"], columns="stage", values="seconds", sort=False)


def layer_headline(layers: pd.DataFrame) -> dict[str, str]:
    """The notebook's negative result: where measured packed layers are slower than dense ones, the slowest way."""
    packed = layers["method"].str.startswith("endor") & layers["evidence"].eq("measured") & layers["stage"].eq("total")
    slower = layers[packed & layers["speedup"].lt(1)]
    if slower.empty:
        return {}
    worst = slower.loc[slower["speedup"].idxmin()]
    same = layers[packed & layers["model"].eq(worst["model"]) & layers["placement"].eq(worst["placement"])]
    best = same.loc[same["speedup"].idxmax()]
    also = "" if best["method"] == worst["method"] else f", {best['method']} at {best['speedup']:.2f} times"
    return {
        "negative": f"With weights {PLACES[worst['placement']]}, {worst['method']} runs a layer of {worst['model']} at "
        f"{worst['speedup']:.2f} times the speed of dense weights{also} (measured)."
    }


def layer_ways() -> list[Placed]:
    """Every way in which a layer is measured, in one measurement that figures share."""
    one_by_one = all_ways(device="cpu", methods=LAYER_METHODS)
    pipelined = all_ways(["pipelined"], "cpu", LAYER_METHODS)
    return [(way, place) for place in PLACEMENTS for way in one_by_one] + [(way, "storage") for way in pipelined]


def _stages(spans: pd.DataFrame, workload: Workload, ways: Iterable[Placed], op: str) -> pd.DataFrame:
    """The `stage_summary` of each way."""
    shared = {"profile": THIS_MACHINE, **asdict(workload), "op": op}
    tables = [stage_summary(spans_of(spans, placed)).assign(**shared, **labels(placed)) for placed in ways]
    return pd.concat(tables, ignore_index=True).drop(columns=["tokens", "stored_bytes"])


def _beside(measured: pd.DataFrame, modelled: pd.DataFrame) -> pd.DataFrame:
    return beside_measured(pd.concat([beside_dense(measured), modelled], ignore_index=True))
