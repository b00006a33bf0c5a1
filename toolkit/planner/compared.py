"""`run --compare` measures what the planner predicts, so each comparison tells the planner what it was off by."""

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from toolkit.planner import history, sizes
from toolkit.planner.speed import Machine, speed
from toolkit.planner.target import open_target
from toolkit.planner.ways import BFLOAT16, INT8, PlannedWay, ways
from toolkit.policies.methods import find_method
from toolkit.storage.store import Store


def remember(store: Store, table: pd.DataFrame, machine: Machine, limited: bool) -> dict[str, float]:
    """Keep the measured tokens a second of our ways beside what is predicted of them; return the latter by way.

    `table` is that of `toolkit.measure.side_by_side.token_rates`, of the decoder in `store`. Without a limit of memory
    all of a way stays there.
    """
    shape, predicted = open_target(str(store.model_folder)).shape, {}
    for way, row in _ours(store, table):
        footprint = sizes.footprint(shape, way)
        dram_bytes = machine.dram_bytes if limited else footprint.all_bytes
        if footprint.needed_bytes <= dram_bytes:
            found = speed(shape, way, replace(machine, dram_bytes=dram_bytes), 1)
            name = str(store.model.get("name"))
            history.record(name, way, dram_bytes, found.tokens_s, row["tokens_per_s"], row["disturbed"])
            predicted[row["way"]] = found.tokens_s
    return predicted


def _ours(store: Store, table: pd.DataFrame) -> Iterator[tuple[PlannedWay, pd.Series]]:
    """The rows of ways that the planner knows, with these."""
    recipe = store.model
    sparsity = 0.5 if recipe.get("pattern") else recipe.get("sparsity", 0.0)
    for _, row in table.iterrows():
        if row["way"].startswith("llama.cpp"):
            continue
        form = find_method(row["way"]).format
        dtype = INT8 if recipe.get("int8") and form in store.variants else BFLOAT16
        zeros = 0.0 if form in ("dense", "spqr") else sparsity
        for way in ways(experts=False):
            if (way.method, way.dtype) == (row["way"], dtype):
                yield replace(way, name=f"{row['way']} {dtype}, {zeros:.0%} zeros", sparsity=zeros), row
                break
