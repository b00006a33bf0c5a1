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
