"""ENDOR's operations and layers on this machine: measured, and predicted by the cost model from what it can do.

    operations_here(Workload("opt-66b/8"), ["fc1"])     # beside operation_table(profile("endor-rtx4080"), ...)
    layer_here(Workload("opt-66b/16"))                  # beside layer_table(...)

The device is the CPU. What the model predicts from (rates of reading, of unpacking and of products) is measured apart
from what it predicts. All measurements are kept under `data/cache/measured/`, by machine, disk and code.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from itertools import product

import pandas as pd

from toolkit import paths
from toolkit.errors import unknown
from toolkit.formats.packed import DTYPES
from toolkit.machines.machine import Profile
from toolkit.machines.probe import probe
from toolkit.measure.accelerate import ACCELERATE, Rival, beside, timed_linear
from toolkit.measure.line import Line, fit_line
from toolkit.measure.passes import PLACEMENTS, Case, timed_passes, twin_store
from toolkit.measure.repetitions import CIRCUMSTANCES, SPAN, kept_spans, median_repetition, median_stages, timeline_of
from toolkit.models.shapes import random_pruned
from toolkit.papers.endor import Workload, layer_table, operation_table, plans
from toolkit.simulation.cost_model import METHODS, Plan, with_rates
from toolkit.timeline.spans import Timeline
from toolkit.timeline.tables import beside_dense, beside_measured

RATES_MODEL, RATES_OP = "opt-6.7b", "fc1"  # timed for nothing else
RATES_PARTS = (1, 4, 16, 64, 256)  # of its rows: from what is larger than the caches to where fixed times are half
RATES_REPETITIONS = 7
LAYER_METHODS = ("dense", "endor", "endor_packed")  # ZSTD is left to single operations: it would take most of the time
CASE = ["method", "placement", "policy"]


def machine_here(dtype: str = "float16", sparsity: float = 0.5, fresh: bool = False) -> Profile:
    """The probe's profile of this machine, with what it takes here to read, unpack and multiply such weights.

    Fixed times and rates are lines (`fit_line`) through the medians of passes through parts of a matrix of another
    model, by the same code as what is predicted. The probe's own bandwidth of the disk is that of its best setting,
    which a shared disk seldom holds.
    """
    workload = Workload(RATES_MODEL, dtype, sparsity)
    parts = {f"{RATES_OP}/{part}": replace(workload, model=f"{RATES_MODEL}/{part}") for part in RATES_PARTS}
    shapes = {name: part.shapes([RATES_OP])[RATES_OP] for name, part in parts.items()}
    lines = _lines(_spans(workload, shapes, _cases("storage"), RATES_REPETITIONS, fresh))
    read, machine = lines["read"]["any"], probe()
    links = replace(machine.links, storage_to_dram_gb_s=read.gb_s, storage_to_dram_fixed_s=read.fixed_s)
    rates = [{form: line.gb_s for form, line in lines[stage].items()} for stage in ("decode", "compute")]
    fixed = [{form: line.fixed_s for form, line in lines[stage].items()} for stage in ("decode", "compute")]
    return with_rates(replace(machine, links=links), "dram", *rates, *fixed)


def _lines(spans: pd.DataFrame) -> dict[str, dict[str, Line]]:
    """For each stage and format worked on ("any" is read alike), the line through the median seconds of every size."""
    methods = spans["method"].map(METHODS)
    stored = methods.map(lambda method: method.format)
    used = stored.where(methods.map(lambda method: not method.decoded_in), "dense")
    form = stored.mask(spans["stage"] == "compute", used).mask(spans["stage"] == "read", "any")
    timed = spans.assign(form=form, seconds=spans["end_s"] - spans["start_s"])[spans["repetition"] > 0]
    points = timed.groupby(["stage", "form", "method", "nbytes"], as_index=False)["seconds"].median()
    found: dict[str, dict[str, Line]] = {}
    for (stage, form), rows in points.groupby(["stage", "form"]):
        found.setdefault(stage, {})[form] = fit_line(rows["nbytes"], rows["seconds"])
    return found


def operations_here(
    workload: Workload,
    ops: Sequence[str],
    methods: Iterable[str] = tuple(METHODS),
    repetitions: int = 7,
    fresh: bool = False,
    accelerate: bool = False,
) -> pd.DataFrame:
    """Linear operations read from the disk, as `operation_table` has them, measured and modelled.

    With `accelerate`, Hugging Face Accelerate's disk offload of the same weights takes its turns as one more method.

    More columns: low_s, median_s and high_s, the stage's least, median and most seconds of all repetitions but the
    first; `mode`, "direct" if the page cache was passed by; `measured_at`, in UTC; `modelled_over_measured`, in the
    rows that are modelled: their seconds over median_s, since one repetition's may hold a pause that no other has.
    Raises `UserError` for unknown names, a disk too small, or bytes read back that are not those written.
    """
    choices = plans(device="cpu", methods=methods)
    tables = []
    for op, shape in workload.shapes(ops).items():  # each by itself, so that notebooks share what they have in common
        spans = _spans(workload, {op: shape}, _cases("storage"), repetitions, fresh, accelerate)
        tables.append(_stages(spans, workload, choices, op))
        if accelerate:
            tables.append(_accelerate(spans, workload, op))
    measured = beside_dense(pd.concat(tables, ignore_index=True))
    machine = machine_here(workload.dtype, workload.sparsity, fresh)
    modelled = operation_table(machine, workload, ops, choices=choices)
    return beside_measured(pd.concat([measured, modelled], ignore_index=True))


def layer_here(
    workload: Workload,
    methods: Iterable[str] = LAYER_METHODS,
    placements: Sequence[str] = PLACEMENTS,
    repetitions: int = 5,
    fresh: bool = False,
    policies: Iterable[str] = ("sequential",),
) -> pd.DataFrame:
    """A decoder layer's linears as `layer_table` has them, measured and modelled; see `operations_here`.

    `methods` are of `LAYER_METHODS`; "pipelined" is measured of layers in storage.
    """
    for name in methods:
        if name not in LAYER_METHODS:
            raise unknown("method for layers", name, LAYER_METHODS)
    choices = plans(policies, "cpu", methods)
    spans = _spans(workload, workload.shapes(), _layer_cases(), repetitions, fresh)
    kept = spans[spans["placement"].isin(placements)]
    measured = beside_dense(_stages(kept, workload, choices, "layer"))
    machine = machine_here(workload.dtype, workload.sparsity, fresh)
    modelled = layer_table(machine, workload, placements, choices)
    return beside_measured(pd.concat([measured, modelled], ignore_index=True))


def layer_spans(workload: Workload, case: Case, repetitions: int = 5) -> pd.DataFrame:
    """The spans of one pass through a layer, the one that `layer_here` shows, as `Timeline.table` has them."""
    spans = _spans(workload, workload.shapes(), _layer_cases(), repetitions, fresh=False)
    chosen = _of(spans, case)
    table = timeline_of(chosen[chosen["repetition"] == median_repetition(chosen)]).table()
    labels = {"profile": "this-machine", "model": workload.model, **asdict(case)}
    return table.assign(**labels, **chosen[CIRCUMSTANCES].iloc[0])


def _cases(placement: str) -> list[Case]:
    return [Case(plan.method, placement) for plan in plans(device="cpu")]


def _layer_cases() -> list[Case]:
    pipelined = [Case(method, "storage", "pipelined") for method in LAYER_METHODS]
    return [Case(method, placement) for placement in PLACEMENTS for method in LAYER_METHODS] + pipelined


def _spans(
    workload: Workload, shapes: dict, cases: Sequence[Case], repetitions: int, fresh: bool, accelerate: bool = False
) -> pd.DataFrame:
    """A row a span: the columns of `CASE`, repetition (the first is 0), those of `CIRCUMSTANCES` and of `Span`.

    With `accelerate` there are rows of `Rival`, too; it takes its turn behind the cases. Only of a single shape.
    """
    named = [asdict(case) for case in (*cases, *[Rival()] * accelerate)]
    key = asdict(workload) | {"ops": list(shapes), "cases": named, "repetitions": repetitions}
    forms = list(dict.fromkeys(METHODS[case.method].format for case in cases))

    def measure() -> pd.DataFrame:
        with ExitStack() as stack:
            store = stack.enter_context(twin_store(shapes, DTYPES[workload.dtype], workload.sparsity, forms))
            passes = timed_passes(store, cases, repetitions)
            if accelerate:
                passes = beside(passes, cases[-1], stack.enter_context(_rival(workload, *shapes.values())))
            return pd.concat(
                timeline.table()[SPAN].assign(**asdict(case), repetition=repetition, mode=mode)
                for case, repetition, mode, timeline in passes
            )

    return kept_spans(key, ("toolkit.measure.passes", "toolkit.measure.accelerate"), measure, fresh)


def _rival(workload: Workload, shape: tuple[int, int]) -> AbstractContextManager[Callable[[], Timeline]]:
    return timed_linear(random_pruned(shape, workload.sparsity, DTYPES[workload.dtype]), paths.cache_dir())


def _stages(spans: pd.DataFrame, workload: Workload, choices: Sequence[Plan], op: str) -> pd.DataFrame:
    """Rows of `Timeline.stages()` of each plan that was measured: those of the repetition whose total is the median."""
    rows = []
    for placement, plan in product(dict.fromkeys(spans["placement"]), choices):
        chosen = _of(spans, Case(plan.method, placement, plan.policy))
        if len(chosen):
            labels = {"profile": "this-machine", **asdict(workload), "op": op, "placement": placement, **asdict(plan)}
            rows.append(median_stages(chosen).assign(**labels))
    return pd.concat(rows, ignore_index=True)


def _accelerate(spans: pd.DataFrame, workload: Workload, op: str) -> pd.DataFrame:
    """Rows as `_stages` gives them; the labels are those of dense weights, but for the method."""
    labels = {"profile": "this-machine", **asdict(workload), "op": op, "placement": "storage"}
    labels |= asdict(Plan("dense", device="cpu")) | {"method": ACCELERATE}
    return median_stages(_of(spans, Rival())).assign(**labels)


def _of(spans: pd.DataFrame, case: Case | Rival) -> pd.DataFrame:
    return spans[(spans[CASE] == pd.Series(asdict(case))).all(axis=1)]
