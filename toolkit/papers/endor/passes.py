"""ENDOR's passes through whole models: its maps of layers, the times in its text, our goals, and whether decoding pays.

pass_table(profile("endor-rtx4080"), Workload("opt-66b"))
"""

from collections.abc import Sequence

import pandas as pd

from toolkit.errors import unknown
from toolkit.machines.machine import GB, Profile
from toolkit.models.workload import Workload
from toolkit.policies.methods import ACCELERATE
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way
from toolkit.simulation import tables

# Sections 3.3 and 5.1, C.1 and C.3. The 20 remapped layers of Llama2-70B take more than the 10 dense ones did: 17 fit
MAPS = {
    "opt-66b": {"published": LayerMap(5, 8, 51), "remapped": LayerMap(5, 14, 45)},
    "llama2-70b": {"published": LayerMap(6, 10, 64), "remapped": LayerMap(6, 20, 54)},
}


# ours and other, each a method and policy with all layers on disk
PAIRS = (
    (("endor", "pipelined"), ("dense", "pipelined")),
    (("endor_packed", "pipelined"), ("dense", "pipelined")),
    (("endor", "pipelined"), (ACCELERATE, "sequential")),
    (("endor_packed", "pipelined"), ("llama.cpp F16", "sequential")),
)


def pass_table(machine: Profile, workload: Workload, choices: Sequence[Way] = ()) -> pd.DataFrame:
    """One pass through all layers of a model that the paper maps, by `toolkit.simulation.tables.pass_table`.

    `mapping` is `published`, the map of the dense model; `remapped`, the paper's with packed layers; or `refilled`.
    Raises `UserError` for a model that the paper gives no map of.
    """
    if workload.model not in MAPS:
        raise unknown("mapped model", workload.model, MAPS)
    return tables.pass_table(machine, workload, MAPS[workload.model], choices)


def decoding_pays(table: pd.DataFrame, other: Profile) -> pd.DataFrame:
    """How fast the CPU unpacks Endor, and how fast it must be for that to pay: a row for this machine, one for `other`.

    Columns in dense GB a second: decode_gb_s, decoding alone; cpu_gb_s, decoding and the product, which run on the same
    cores (decoding alone on a machine whose GPU multiplies); read_gb_s of the disk; pays_sequential_gb_s, at which
    decoding takes as long as the shorter read saves; pays_pipelined_gb_s, at which the cores take as long as the packed
    read and so hide behind it. `pays` and `hides` say whether the rates reach these. `basis`, a key of `BASES`, says
    where decode_gb_s comes from. This machine's row comes from `table` of `pass_measurements`, its sequential pass from
    disk; the other's from its profile.
    """
    chosen = table[(table["method"] == "endor") & (table["policy"] == "sequential") & (table["mapping"] == "storage")]
    stages = chosen[chosen["evidence"] == "measured"].set_index("stage")
    dense_gb = stages["nbytes"]["decode"] / GB
    busy_s = stages["seconds"][["decode", "compute"]].sum()
    measured = {
        "decode_gb_s": stages["gb_s"]["decode"],
        "cpu_gb_s": dense_gb / busy_s,
        "read_gb_s": stages["gb_s"]["read"],
    }
    decoded = other.dram.decode_gb_s["endor"]
    profiled = {"decode_gb_s": decoded, "cpu_gb_s": decoded, "read_gb_s": other.links.storage_to_dram_gb_s}
    rates = pd.DataFrame([measured, profiled], index=["this-machine", other.id])
    share = stages["nbytes"]["read"] / stages["nbytes"]["decode"]
    rates["pays_sequential_gb_s"] = rates["read_gb_s"] / (1 - share)
    rates["pays_pipelined_gb_s"] = rates["read_gb_s"] / share
    return rates.assign(
        pays=rates["decode_gb_s"] > rates["pays_sequential_gb_s"],
        hides=rates["cpu_gb_s"] >= rates["pays_pipelined_gb_s"],
        basis=["measured", other.sources["dram.decode_gb_s.endor"].basis],
    )
