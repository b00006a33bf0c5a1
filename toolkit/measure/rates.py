"""This machine as the cost model needs it: what the probe finds, and the times in which weights are read and used.

The inputs of the model are measured apart from its predictions.
"""

from dataclasses import replace

import pandas as pd

from toolkit.costs.cost_model import with_rates
from toolkit.costs.curve import Curve
from toolkit.costs.machine import Profile
from toolkit.costs.probe import probe
from toolkit.measure.line import Line, fit_line
from toolkit.measure.passes import measured_spans
from toolkit.models.workload import Workload
from toolkit.policies.methods import METHODS
from toolkit.policies.ways import all_ways

RATES_MODEL, RATES_OP = "opt-30b", "fc1"  # timed for nothing else
# Parts of its rows, from 411 MB in fp16 to 0.4: the largest is near the largest weight that is predicted, for a rate
# found with small weights is not that of large ones (`toolkit.costs.curve`)
RATES_PARTS = (1, 4, 16, 64, 256, 1024)
RATES_REPETITIONS = 5


def this_machine(dtype: str = "float16", sparsity: float = 0.5, fresh: bool = False) -> Profile:
    """The probe's profile of this machine, with what it takes here to read, unpack and multiply such weights.

    All of it comes from passes through parts of a matrix of another model, by the same code as what is predicted, as
    medians over the repetitions. Reads are a line (`fit_line`): a fixed time and a rate. Decoding and products are a
    curve (`Curve`) for each format. The probe's own bandwidth of the disk is that of its best setting, which a shared
    disk seldom holds.
    """
    workload = Workload(RATES_MODEL, dtype, sparsity)
    parts = {f"{RATES_OP}/{part}": replace(workload, model=f"{RATES_MODEL}/{part}") for part in RATES_PARTS}
    shapes = {name: part.shapes([RATES_OP])[RATES_OP] for name, part in parts.items()}
    ways = [(way, "storage") for way in all_ways(device="cpu")]
    spans = measured_spans(workload, shapes, ways, RATES_REPETITIONS, fresh=fresh)
    spans = spans.assign(seconds=spans["end_s"] - spans["start_s"])
    read, machine = _read_line(spans), probe()
    links = replace(machine.links, storage_to_dram_gb_s=read.gb_s, storage_to_dram_fixed_s=read.fixed_s)
    curves = {"decode_curves": _curves(spans, "decode"), "matvec_curves": _curves(spans, "compute")}
    return with_rates(replace(machine, links=links), "dram", **curves)


def _read_line(spans: pd.DataFrame) -> Line:
    """The line through the median seconds of every method's reads of every size: all formats are read alike."""
    reads = spans[spans["stage"] == "read"]
    points = reads.groupby(["method", "nbytes"], as_index=False)["seconds"].median()
    return fit_line(points["nbytes"], points["seconds"])


def _curves(spans: pd.DataFrame, stage: str) -> dict[str, Curve]:
    """For each format that a stage works on, the curve through the median seconds of every size.

    Decoding works on the stored format; a product on it, too, or on the dense weight that decoding made of it.
    """
    rows = spans[spans["stage"] == stage]
    methods = rows["method"].map(METHODS)
    stored = methods.map(lambda method: method.format)
    used = stored.where(methods.map(lambda method: not method.decoded_in), "dense")
    form = stored if stage == "decode" else used
    points = rows.assign(form=form).groupby(["form", "nbytes"], as_index=False)["seconds"].median()
    return {form: Curve.through(sizes["nbytes"], sizes["seconds"]) for form, sizes in points.groupby("form")}
