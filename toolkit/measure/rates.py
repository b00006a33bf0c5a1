"""This machine as the cost model needs it: what the probe finds, and the rates at which weights are read and used.

What the model predicts from is measured apart from what it predicts.
"""

from dataclasses import replace

import pandas as pd

from toolkit.machines.machine import Profile
from toolkit.machines.probe import probe
from toolkit.measure.line import Line, fit_line
from toolkit.measure.spans import measured_spans
from toolkit.models.workload import Workload
from toolkit.policies.methods import METHODS
from toolkit.policies.ways import all_ways
from toolkit.simulation.cost_model import with_rates

RATES_MODEL, RATES_OP = "opt-6.7b", "fc1"  # timed for nothing else
RATES_PARTS = (1, 4, 16, 64, 256)  # of its rows: from what is larger than the caches to where fixed times are half
RATES_REPETITIONS = 7


def this_machine(dtype: str = "float16", sparsity: float = 0.5, fresh: bool = False) -> Profile:
    """The probe's profile of this machine, with what it takes here to read, unpack and multiply such weights.

    Fixed times and rates are lines (`fit_line`) through the medians of passes through parts of a matrix of another
    model, by the same code as what is predicted. The probe's own bandwidth of the disk is that of its best setting,
    which a shared disk seldom holds.
    """
    workload = Workload(RATES_MODEL, dtype, sparsity)
    parts = {f"{RATES_OP}/{part}": replace(workload, model=f"{RATES_MODEL}/{part}") for part in RATES_PARTS}
    shapes = {name: part.shapes([RATES_OP])[RATES_OP] for name, part in parts.items()}
    ways = [(way, "storage") for way in all_ways(device="cpu")]
    lines = _lines(measured_spans(workload, shapes, ways, RATES_REPETITIONS, fresh))
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
