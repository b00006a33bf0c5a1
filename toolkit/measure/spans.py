"""The spans of timed passes through operations or a layer, kept under the cache by machine, disk and code."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import pandas as pd

from toolkit import paths
from toolkit.files import scratch_folder
from toolkit.formats.packed import DTYPES
from toolkit.measure.accelerate import AcceleratedLinear
from toolkit.measure.passes import labels, layer_passes, twin_store
from toolkit.measure.turns import measured, take_turns
from toolkit.models.shapes import random_pruned
from toolkit.models.workload import Workload
from toolkit.policies.methods import RIVALS
from toolkit.policies.ways import Placed


@measured
def measured_spans(
    workload: Workload, shapes: Mapping[str, tuple[int, int]], ways: Sequence[Placed], repetitions: int
) -> pd.DataFrame:
    """One row per span: the fields of `Way`, placement, and the columns of `take_turns`. One turn of each warms up.

    Accelerate may be among the ways if there is a single shape.
    """
    ours = [case for case in ways if case[0].method not in RIVALS]
    forms = list(dict.fromkeys(way.stored.format for way, _ in ours))
    with ExitStack() as stack:
        store = stack.enter_context(twin_store(shapes, DTYPES[workload.dtype], workload.sparsity, forms))
        contestants = layer_passes(store, ours)
        for case in ways[len(ours) :]:
            (shape,) = shapes.values()
            weight = random_pruned(shape, workload.sparsity, DTYPES[workload.dtype])
            folder = stack.enter_context(scratch_folder(paths.cache_dir()))
            contestants.append(AcceleratedLinear(weight, folder / "weights", labels(case)))
            del weight  # it may take a large part of memory
        return take_turns(contestants, repetitions, warm_up=1)


def spans_of(spans: pd.DataFrame, placed: Placed) -> pd.DataFrame:
    """The rows of one way and placement."""
    wanted = pd.Series(labels(placed))
    return spans[(spans[list(wanted.index)] == wanted).all(axis=1)]
