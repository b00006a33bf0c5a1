"""Operations and layers of ENDOR's figures: the paper's machine modelled, this one measured and modelled.

    twin, part = Workload("opt-66b"), Workload("opt-66b/8")
    table, null = operation_times("endor-rtx4080", twin, part, ["fc1"], ["dense", "endor"])

`table` has the rows of `toolkit.simulation.tables` for the paper's machine, then those of
`toolkit.papers.endor.operations` for this one. `null` is the null model's table of the paper's machine
(`toolkit.simulation.null_model`).
"""

from collections.abc import Iterable, Sequence

import pandas as pd

from toolkit.machines.hardware import profile
from toolkit.measure.passes import PLACEMENTS
from toolkit.models.workload import Workload
from toolkit.papers.endor.operations import layer_measurements, operation_measurements
from toolkit.policies.ways import all_ways
from toolkit.simulation.null_model import with_null_model
from toolkit.simulation.tables import layer_table, operation_table
from toolkit.timeline.tables import DENSE, LABELS, way_names

Tables = tuple[pd.DataFrame, pd.DataFrame]
PLACES = {"storage": "on disk", "dram": "in DRAM", "device": "in the device's memory"}


def operation_times(
    machine: str,
    twin: Workload,
    measured: Workload,
    ops: Sequence[str],
    methods: Sequence[str],
    paths: Sequence[str] = ("host",),
    repetitions: int = 7,
    fresh: bool = False,
    accelerate: bool = False,
) -> Tables:
    """Single operations, read from the disk: `twin` on the paper's `machine`, `measured` on this one.

    A bar of the figure (`way`) is an operation, where there are several, and a method. With `accelerate`, the disk
    offload of Hugging Face takes part on this machine.
    """
    choices = all_ways(methods=methods, paths=paths)
    modelled, null = with_null_model(operation_table, profile(machine), twin, ops, choices=choices)
    ours = operation_measurements(measured, ops, methods, repetitions, fresh, accelerate)
    return _with_ways([modelled, ours], ["op"] * (len(ops) > 1)), null


def layer_times(
    machine: str,
    twins: Sequence[Workload],
    measured: Sequence[Workload],
    methods: Sequence[str],
    placements: Sequence[str] = (),
    paths: Sequence[str] = ("host",),
    policies: Iterable[str] = ("sequential",),
    repetitions: int = 5,
    fresh: bool = False,
) -> Tables:
    """Whole decoder layers: `twins` on the paper's `machine`, one operation after the other; `measured` on this one.

    `placements` are the tiers that layers lie in: all that a machine has, unless given. `policies` are of this machine.
    A bar of the figure (`way`) is a model or a placement, whichever there are several of, and a method.
    """
    choices = all_ways(methods=methods, paths=paths)
    tables = [with_null_model(layer_table, profile(machine), twin, placements, choices) for twin in twins]
    modelled, null = (pd.concat(each) for each in zip(*tables, strict=True))
    ours = [
        layer_measurements(workload, methods, placements or PLACEMENTS, repetitions, fresh, policies)
        for workload in measured
    ]
    return _with_ways([modelled, *ours], ["model" if len(twins) > 1 else "placement"]), null


def times_by_machine(table: pd.DataFrame) -> pd.DataFrame:
    """Seconds to look at: a row for each machine, way and kind of evidence, a column for each stage."""
    return table.pivot_table(index=["profile", "way", "evidence"], columns="stage", values="seconds", sort=False)


def over_saved_copy(table: pd.DataFrame) -> pd.DataFrame:
    """Add `decode_over_saved_copy` to rows of decoding: their time over what packing saves on the copy to the GPU.

    Section 5.1 has it below 1. NaN in other rows, and for a way that copies dense weights.
    """
    keys = [label for label in LABELS if label in table and label != "stage"]
    copies = table[table["stage"] == "copy"].set_index(keys)["seconds"]
    own = copies.reindex(pd.MultiIndex.from_frame(table[keys])).to_numpy()
    dense = copies.reindex(pd.MultiIndex.from_frame(table[keys].assign(**DENSE))).to_numpy()
    ratio = table["seconds"] / pd.Series(dense - own, table.index).where(lambda saved: saved > 0)
    return table.assign(decode_over_saved_copy=ratio.where(table["stage"] == "decode"))


def fc_share(spans: pd.DataFrame) -> pd.DataFrame:
    """A row with `share_of_transfer_percent`: what fc1 and fc2 take of the transfers of a layer (section 2.2: 66 %).

    `spans` are those of one OPT layer, as `Timeline.table` gives them, with profile, model and evidence.
    """
    moved = spans[spans["stage"].isin(["read", "copy"])]
    share = 100 * moved.loc[moved["op"].isin(["fc1", "fc2"]), "nbytes"].sum() / moved["nbytes"].sum()
    row = {"op": "fc1 and fc2", "stage": "transfer", "share_of_transfer_percent": share}
    return pd.DataFrame([dict(spans[["profile", "model", "evidence"]].iloc[0]) | row])


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


def _with_ways(tables: Sequence[pd.DataFrame], labels: Sequence[str]) -> pd.DataFrame:
    table = pd.concat(tables, ignore_index=True)
    return table.assign(way=way_names(table, *labels))
