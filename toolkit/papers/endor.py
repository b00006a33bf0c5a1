"""ENDOR: its maps of layers, and its passes predicted.

pass_table(profile("endor-rtx4080"), Workload("opt-66b"))      # the times in its text
"""

from collections.abc import Sequence

import pandas as pd

from toolkit.errors import unknown
from toolkit.machines.machine import Profile
from toolkit.models.workload import Workload
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way
from toolkit.simulation import tables
from toolkit.timeline.tables import DENSE, LABELS

# Sections 3.3 and 5.1, C.1 and C.3. The 20 remapped layers of Llama2-70B take more than the 10 dense ones did: 17 fit
MAPS = {
    "opt-66b": {"published": LayerMap(5, 8, 51), "remapped": LayerMap(5, 14, 45)},
    "llama2-70b": {"published": LayerMap(6, 10, 64), "remapped": LayerMap(6, 20, 54)},
}


def pass_table(machine: Profile, workload: Workload, choices: Sequence[Way] = ()) -> pd.DataFrame:
    """One pass through all layers of a model that the paper maps, by `toolkit.simulation.tables.pass_table`.

    `mapping` is `published`, the map of the dense model; `remapped`, the paper's with packed layers; or `refilled`.
    Raises `UserError` for a model that the paper gives no map of.
    """
    if workload.model not in MAPS:
        raise unknown("mapped model", workload.model, MAPS)
    return tables.pass_table(machine, workload, MAPS[workload.model], choices)


def fc_share(spans: pd.DataFrame) -> pd.DataFrame:
    """A row with `share_of_transfer_percent`: what fc1 and fc2 take of the transfers of a layer (section 2.2: 66 %).

    `spans` are those of one OPT layer, as `Timeline.table` gives them, with profile, model and evidence.
    """
    moved = spans[spans["stage"].isin(["read", "copy"])]
    share = 100 * moved.loc[moved["op"].isin(["fc1", "fc2"]), "nbytes"].sum() / moved["nbytes"].sum()
    row = {"op": "fc1 and fc2", "stage": "transfer", "share_of_transfer_percent": share}
    return pd.DataFrame([dict(spans[["profile", "model", "evidence"]].iloc[0]) | row])


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
