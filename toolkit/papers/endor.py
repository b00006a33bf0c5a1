"""ENDOR's measurements, predicted: its operations, layers and passes by method, as tables with a row a stage.

    machine = profile("endor-rtx4080")
    operation_table(machine, Workload("opt-66b"), ops=["fc1"])      # figures 5, 8 to 15
    layer_table(machine, Workload("llama2-70b"))                    # figures 2, 6, 7, 16
    pass_table(machine, Workload("opt-66b"))                        # the times in its text

All tables have the columns of `LABELS` that apply, those of `Timeline.stages()` and those of `beside_dense`; `choices`
are the plans to predict, `plans()` if none is given. On a machine without a GPU: `plans(device="cpu")`, and no layer
in device memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import pandas as pd

from toolkit.errors import unknown
from toolkit.machines.machine import Profile
from toolkit.models.shapes import twin_shapes
from toolkit.policies.methods import METHODS, Method
from toolkit.policies.placement import LayerMap
from toolkit.simulation.cost_model import PATHS, Layer, Plan, predict, weights
from toolkit.timeline.spans import TIERS, Timeline
from toolkit.timeline.tables import LABELS, beside_dense, over

# Sections 3.3 and 5.1, C.1 and C.3. The 20 remapped layers of Llama2-70B take more than the 10 dense ones did: 17 fit
MAPS = {
    "opt-66b": {"published": LayerMap(5, 8, 51), "remapped": LayerMap(5, 14, 45)},
    "llama2-70b": {"published": LayerMap(6, 10, 64), "remapped": LayerMap(6, 20, 54)},
}


@dataclass(frozen=True)
class Workload:
    """A model of `toolkit.models.shapes` or a part of it ("opt-66b/8"), its dense data type and share of zeros.

    Raises `UserError` for an unknown model.
    """

    model: str
    dtype: str = "float16"
    sparsity: float = 0.5

    def __post_init__(self):
        """Refuse an unknown model."""
        twin_shapes(self.model)

    def shapes(self, ops: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
        """Outputs × inputs of these operations, of all of a layer if none is named; `UserError` for an unknown one."""
        known = twin_shapes(self.model)
        for op in ops:
            if op not in known:
                raise unknown(f"layer of {self.model}", op, known)
        return {op: known[op] for op in ops or known}

    def layer(self, machine: Profile, method: str, placement: str) -> Layer:
        """A whole decoder layer."""
        overhead_s = machine.software.layer_s if machine.software else 0.0
        return Layer(weights(self.shapes(), method, self.dtype, self.sparsity), placement, overhead_s)


def plans(
    policies: Iterable[str] = ("sequential",),
    device: str = "gpu",
    methods: Iterable[str] = tuple(METHODS),
    paths: Iterable[str] = PATHS,
) -> list[Plan]:
    """Every method on every path that it can take, of those named. Raises `UserError` for an unknown method.

    Without a GPU nothing is direct, and Endor is decoded in one place only: `endor_cpu` is `endor` then.
    """
    for name in methods:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    ways = [(name, path) for name in methods for path in _paths(METHODS[name], device) if path in paths]
    if device == "cpu":
        ways = [way for way in ways if way != ("endor_cpu", "host")]
    return [Plan(*way, policy, device) for policy in policies for way in ways]


def _paths(method: Method, device: str) -> tuple[str, ...]:
    return ("host",) if device == "cpu" or method.decoded_in == "dram" else PATHS


def operation_table(
    machine: Profile,
    workload: Workload,
    ops: Sequence[str] = (),
    placements: Iterable[str] = ("storage",),
    choices: Sequence[Plan] = (),
) -> pd.DataFrame:
    """Linear operations (all of a layer, if none is named), each by itself, and without the layer's overhead.

    Raises `UserError` for an unknown operation, or a number that the machine's profile lacks.
    """
    chosen = workload.shapes(ops)
    return _table(
        machine,
        workload,
        (
            (predict(machine, [Layer((weight,), placement)], plan), plan, {"op": weight.op, "placement": placement})
            for placement in placements
            for op, shape in chosen.items()
            for plan in choices or plans()
            for weight in weights({op: shape}, plan.method, workload.dtype, workload.sparsity)
        ),
    )


def layer_table(
    machine: Profile, workload: Workload, placements: Iterable[str] = TIERS, choices: Sequence[Plan] = ()
) -> pd.DataFrame:
    """One decoder layer (op "layer") in each tier. Raises `UserError` for a number that the machine's profile lacks."""
    cases = (
        (
            predict(machine, [workload.layer(machine, plan.method, placement)], plan),
            plan,
            {"op": "layer", "placement": placement},
        )
        for placement in placements
        for plan in choices or plans()
    )
    return _table(machine, workload, cases)


def pass_table(machine: Profile, workload: Workload, choices: Sequence[Plan] = ()) -> pd.DataFrame:
    """One pass through all layers (op "pass"), for each way to place them.

    `mapping` is `published`, the map of the dense model; `remapped`, the paper's with packed layers; or `refilled`,
    the one that takes the bytes of `published` (`LayerMap.refilled`). Columns more: dram_layers, storage_layers, and
    speedup_over_host for the direct path. Raises `UserError` for a model that the paper gives no map of.
    """
    if workload.model not in MAPS:
        raise unknown("mapped model", workload.model, MAPS)
    table = _table(machine, workload, _passes(machine, workload, choices or plans()), mapping="published")
    return table.assign(speedup_over_host=1 / over(table, "seconds", path="host"))


def _passes(machine: Profile, workload: Workload, choices: Sequence[Plan]) -> Iterator[tuple[Timeline, Plan, dict]]:
    for plan in choices:
        layers = {tier: workload.layer(machine, plan.method, tier) for tier in TIERS}
        maps = MAPS[workload.model]
        sizes = [sum(w.nbytes(form) for w in layers["dram"].weights) for form in ("dense", "stored")]
        for mapping, where in (maps | {"refilled": maps["published"].refilled(*sizes)}).items():
            timeline = predict(machine, [layers[tier] for tier in where.tiers], plan)
            counts = {"dram_layers": where.dram, "storage_layers": where.storage}
            yield timeline, plan, {"op": "pass", "mapping": mapping, **counts}


def _table(
    machine: Profile, workload: Workload, cases: Iterable[tuple[Timeline, Plan, dict]], **baseline: str
) -> pd.DataFrame:
    shared = {"profile": machine.id} | asdict(workload)
    rows = [timeline.stages().assign(**shared, **asdict(plan), **labels) for timeline, plan, labels in cases]
    table = beside_dense(pd.concat(rows, ignore_index=True), **baseline)
    first = [label for label in LABELS if label in table]
    return table[[*first, *table.columns.drop(first)]]
