"""Operations and layers on this machine: measured, and predicted by the cost model from the machine's rates.

    operation_measurements(Workload("opt-66b/8"), ["fc1"])     # beside operation_table(profile("endor-rtx4080"), ...)
    layer_measurements(Workload("opt-66b/16"))                 # beside layer_table(...)

The device is the CPU. The model's rates (`toolkit.measure.rates`) are measured apart from what it predicts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import pandas as pd

from toolkit.errors import unknown
from toolkit.measure.accelerate import RIVAL
from toolkit.measure.passes import PLACEMENTS, labels, measured_spans, spans_of
from toolkit.measure.rates import this_machine
from toolkit.measure.summary import stage_summary
from toolkit.measure.turns import timeline_of
from toolkit.models.workload import Workload
from toolkit.policies.methods import METHODS
from toolkit.policies.ways import Placed, Way, all_ways
from toolkit.simulation.tables import layer_table, operation_table
from toolkit.timeline.tables import beside_dense, beside_measured

PROFILE = "this-machine"
LAYER_METHODS = ("dense", "endor", "endor_packed")  # ZSTD is left to single operations: it would take most of the time


def operation_measurements(
    workload: Workload,
    ops: Sequence[str],
    methods: Iterable[str] = tuple(METHODS),
    repetitions: int = 7,
    fresh: bool = False,
    accelerate: bool = False,
) -> pd.DataFrame:
    """Linear operations read from the disk, as `operation_table` has them, measured and modelled.

    With `accelerate`, Hugging Face Accelerate's disk offload of the same weights takes its turns as one more method.

    seconds are medians over the repetitions, with seconds_low and seconds_high. `mode` is "direct" if reads went past
    the page cache. `measured_at` is in UTC. `modelled_over_measured`, in modelled rows, is their seconds over the
    measured ones. Raises `UserError` for unknown names, a disk too small, or bytes read back that are not those
    written.
    """
    choices = all_ways(device="cpu", methods=methods)
    rivals = [RIVAL] * accelerate
    timed = [(way, "storage") for way in all_ways(device="cpu")] + rivals
    tables = []
    for op, shape in workload.shapes(
        ops
    ).items():  # measured one by one, so that notebooks share measurements of the same operation
        spans = measured_spans(workload, {op: shape}, timed, repetitions, fresh=fresh)
        tables.append(_stages(spans, workload, [(way, "storage") for way in choices] + rivals, op))
    measured = beside_dense(pd.concat(tables, ignore_index=True))
    machine = this_machine(workload.dtype, workload.sparsity, fresh)
    modelled = operation_table(machine, workload, ops, choices=choices)
    return beside_measured(pd.concat([measured, modelled], ignore_index=True))


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
    for name in methods:
        if name not in LAYER_METHODS:
            raise unknown("method for layers", name, LAYER_METHODS)
    choices = all_ways(policies, "cpu", methods)
    spans = measured_spans(workload, workload.shapes(), _layer_ways(), repetitions, fresh=fresh)
    wanted = [(way, placement) for placement in placements for way in choices if (way, placement) in _layer_ways()]
    measured = beside_dense(_stages(spans, workload, wanted, "layer"))
    machine = this_machine(workload.dtype, workload.sparsity, fresh)
    modelled = layer_table(machine, workload, placements, choices)
    return beside_measured(pd.concat([measured, modelled], ignore_index=True))


def layer_spans(workload: Workload, way: Way, placement: str = "storage", repetitions: int = 5) -> pd.DataFrame:
    """The spans of one pass through a layer, that of the median repetition, as `Timeline.table` has them."""
    spans = measured_spans(workload, workload.shapes(), _layer_ways(), repetitions)
    chosen = spans_of(spans, (way, placement))
    totals = {number: timeline_of(turn).total_s for number, turn in chosen.groupby("repetition")}
    typical = chosen[chosen["repetition"] == sorted(totals, key=totals.get)[(len(totals) - 1) // 2]]
    shared = {"profile": PROFILE, "model": workload.model, **labels((way, placement))}
    return timeline_of(typical).table().assign(**shared, **typical[["mode", "measured_at"]].iloc[0])


def _layer_ways() -> list[Placed]:
    one_by_one = all_ways(device="cpu", methods=LAYER_METHODS)
    pipelined = all_ways(["pipelined"], "cpu", LAYER_METHODS)
    return [(way, place) for place in PLACEMENTS for way in one_by_one] + [(way, "storage") for way in pipelined]


def _stages(spans: pd.DataFrame, workload: Workload, ways: Iterable[Placed], op: str) -> pd.DataFrame:
    """The `stage_summary` of each way."""
    shared = {"profile": PROFILE, **asdict(workload), "op": op}
    tables = [stage_summary(spans_of(spans, placed)).assign(**shared, **labels(placed)) for placed in ways]
    tables = [table.drop(columns=["tokens", "stored_bytes"]) for table in tables]
    return pd.concat(tables, ignore_index=True)
