"""The bytes that a token moves in each way: known at once, before this machine is measured."""

import pandas as pd

from toolkit.errors import UserError
from toolkit.models.architectures import ModelShape
from toolkit.planner import sizes
from toolkit.planner.target import Target
from toolkit.planner.ways import EXPERTS, NEURONS, PlannedWay, ways


def bounds(target: Target, dram_bytes: int) -> pd.DataFrame:
    """A row for each way of the toolkit that fits into so many bytes of DRAM, the least reads first.

    Columns: way; read_mb (from the disk for a token, if what is in memory is needed as often as the rest); token_mb (of
    weights that a token is multiplied with); needed_mb (of DRAM, at least). A token takes no less than read_mb at the
    disk's bandwidth, and no less than token_mb at the memory's.
    """
    rows = []
    for way in ways(bool(target.shape.experts), target.cut):
        try:
            memory = sizes.footprint(target.shape, way)
        except UserError:  # a way that this model does not have
            continue
        if way.runs_here and memory.needed_bytes <= dram_bytes:
            used = _used_units(target.shape, way, memory.units) * memory.unit_bytes
            read, token = (1 - memory.held_share(dram_bytes)) * used, sizes.token_bytes(target.shape, way)
            numbers = {"read_mb": read, "token_mb": token, "needed_mb": memory.needed_bytes}
            rows.append({"way": way.name} | {name: nbytes / 1e6 for name, nbytes in numbers.items()})
    table = pd.DataFrame(rows, columns=["way", "read_mb", "token_mb", "needed_mb"])
    return table.sort_values(["read_mb", "token_mb"], kind="stable").reset_index(drop=True)


def _used_units(shape: ModelShape, way: PlannedWay, units: int) -> float:
    """Layers, neurons or experts that a token uses."""
    if way.kind == EXPERTS:
        return shape.experts_per_token * (shape.layers - shape.dense_layers)
    return units * (1 - way.sparsity) if way.kind == NEURONS else units
