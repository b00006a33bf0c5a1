"""This machine's profile for the cost model: the probe's numbers, and the times to read and use weights.

The inputs of the model are measured apart from its predictions. A time may be a line over bytes:

    line = fit_line(nbytes=[1e6, 1e7, 1e8], seconds=[0.0006, 0.0051, 0.0501])    # 0.1 ms, and 2 GB/s
    line.seconds(3e6)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from toolkit.machines.machine import GB, Curve, Profile
from toolkit.machines.probe import probe
from toolkit.models.workload import Workload
from toolkit.offload.methods import METHODS
from toolkit.offload.ways import all_ways
from toolkit.papers.endor.cost_model import with_rates
from toolkit.papers.endor.operations import measured_spans

RATES_MODEL, RATES_OP = "opt-30b", "fc1"  # timed for nothing else
# Parts of its rows, from 411 MB in fp16 to 0.4: the largest is near the largest weight that is predicted, for a rate
# found with small weights is not that of large ones (`Curve`)
RATES_PARTS = (1, 4, 16, 64, 256, 1024)
RATES_REPETITIONS = 5


@dataclass(frozen=True)
class Line:
    """`fixed_s` seconds for any task, and its bytes at `gb_s` GB a second."""

    fixed_s: float
    gb_s: float

    def seconds(self, nbytes: float) -> float:
        """Seconds for so many bytes."""
        return self.fixed_s + nbytes / GB / self.gb_s


def fit_line(nbytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least sum of relative errors, |line / seconds - 1|; its fixed time is not below zero.

    With absolute errors the noise of the largest sizes would decide the fixed time; with squared errors one slow spell
    would decide the line. The best line passes through two of the points, or through one and the origin, so all of
    those are tried.
    """
    size, time = np.asarray(nbytes, float), np.asarray(seconds, float)
    lines: list[tuple[float, float]] = [(0.0, t / s) for s, t in zip(size, time, strict=True)]
    for first, second in zip(*np.triu_indices(len(size), 1), strict=True):
        if size[first] != size[second]:
            slope = (time[second] - time[first]) / (size[second] - size[first])
            lines.append((time[first] - slope * size[first], slope))
    fixed_s, slope = min(
        (line for line in lines if line[0] >= 0 < line[1]), key=lambda line: _off(line[0], line[1], size, time)
    )
    return Line(float(fixed_s), float(1 / slope / GB))


def _off(fixed_s: float, slope: float, size: np.ndarray, time: np.ndarray) -> float:
    return float(np.abs((fixed_s + slope * size) / time - 1).sum())


def this_machine(dtype: str = "float16", sparsity: float = 0.5, fresh: bool = False) -> Profile:
    """The probe's profile of this machine, with measured times to read, unpack and multiply such weights.

    All times come from passes through parts of a matrix of another model, by the same code as the predicted passes;
    they are medians over the repetitions. Reads are a line (`fit_line`): a fixed time and a rate. Decoding and products
    are a curve (`Curve`) for each format. The probe's own bandwidth of the disk is that of its best setting, which a
    shared disk seldom holds.
    """
    workload = Workload(RATES_MODEL, dtype, sparsity)
    parts = {f"{RATES_OP}/{part}": replace(workload, model=f"{RATES_MODEL}/{part}") for part in RATES_PARTS}
    shapes = {name: part.shapes([RATES_OP])[RATES_OP] for name, part in parts.items()}
    ways = [(way, "storage") for way in all_ways(device="cpu")]
    # one place: three would take 5 GB of the disk, and what is predicted lies elsewhere again
    spans = measured_spans(workload, shapes, ways, RATES_REPETITIONS, 1, fresh=fresh)
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
