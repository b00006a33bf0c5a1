"""The spans of timed passes through operations or a layer, kept under the cache by machine, disk and code."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict

import pandas as pd

from toolkit import paths
from toolkit.formats.packed import DTYPES
from toolkit.measure.accelerate import beside, timed_linear
from toolkit.measure.passes import timed_passes, twin_store
from toolkit.measure.repetitions import SPAN, kept_spans
from toolkit.models.shapes import random_pruned
from toolkit.models.workload import Workload
from toolkit.policies.methods import RIVALS
from toolkit.policies.ways import Placed
from toolkit.timeline.spans import Timeline

CODE = ("toolkit.measure.passes", "toolkit.measure.accelerate")


def measured_spans(
    workload: Workload, shapes: Mapping[str, tuple[int, int]], ways: Sequence[Placed], repetitions: int, fresh: bool
) -> pd.DataFrame:
    """A row a span: the fields of `Way`, placement, repetition (the first is 0), mode, and the fields of `Span`.

    A rival among the ways takes its turn after ours; there must be a single shape then.
    """
    ours = [(way, placement) for way, placement in ways if way.method not in RIVALS]
    key = asdict(workload) | {"ops": list(shapes), "ways": list(map(labels, ways)), "repetitions": repetitions}
    forms = list(dict.fromkeys(way.stored.format for way, _ in ours))

    def measure() -> pd.DataFrame:
        with ExitStack() as stack:
            store = stack.enter_context(twin_store(shapes, DTYPES[workload.dtype], workload.sparsity, forms))
            passes = timed_passes(store, ours, repetitions)
            if len(ours) < len(ways):
                passes = beside(passes, ours[-1], stack.enter_context(_rival(workload, *shapes.values())))
            return pd.concat(
                timeline.table()[SPAN].assign(**labels(placed), repetition=repetition, mode=mode)
                for placed, repetition, mode, timeline in passes
            )

    return kept_spans(key, CODE, measure, fresh)


def spans_of(spans: pd.DataFrame, placed: Placed) -> pd.DataFrame:
    """The rows of one way and placement."""
    wanted = pd.Series(labels(placed))
    return spans[(spans[list(wanted.index)] == wanted).all(axis=1)]


def labels(placed: Placed) -> dict[str, str]:
    """The columns that tell a way and placement from others."""
    way, placement = placed
    return asdict(way) | {"placement": placement}


def _rival(workload: Workload, shape: tuple[int, int]) -> AbstractContextManager[Callable[[], Timeline]]:
    return timed_linear(random_pruned(shape, workload.sparsity, DTYPES[workload.dtype]), paths.cache_dir())
