"""SpQR's inference kernel: the roofline of decoding (table 1.1)."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from toolkit.evidence.figures import mark_published
from toolkit.machines.machine import Memory

STEPS = {"add": "add", "gate": "mat-vecs, qk, sv", "softmax": "", "norm": "softmax, norm"}  # of one intensity each


def roofline_figure(
    table: pd.DataFrame, comparison: pd.DataFrame, memories: Mapping[str, Memory], shown: Sequence[str]
) -> Figure:
    """Attainable rates over intensity on the machines `shown`, with the operations of `table` and the published ones.

    `table` is of `toolkit.simulation.arithmetic.roofline` with a column `weight_bits`.
    """
    figure, axes = plt.subplots(figsize=(6.4, 4.6))
    dense = table[table["weight_bits"] == 16]
    intensity = np.geomspace(0.1, 1000, 200)
    for number, name in enumerate(shown):
        steps = dense[dense["machine"] == name]
        dtype = steps["dtype"].iloc[0]
        attainable = [memories[name].attainable_tflop_s(each, dtype) * 1e3 for each in intensity]
        axes.loglog(intensity, attainable, color=f"C{number}", label=f"{memories[name].name} ({dtype})")
        axes.loglog(steps["intensity"], steps["attainable_ops_s"] / 1e9, "o", color=f"C{number}", markersize=4)
    packed = table[table["operation"].eq("gate") & table["machine"].isin(shown) & table["weight_bits"].ne(16)]
    for bits, rows in packed.groupby("weight_bits"):
        axes.plot(
            rows["intensity"], rows["attainable_ops_s"] / 1e9, "k^", markersize=5, label=f"gate, {bits}-bit weights"
        )
    published = comparison.assign(step=comparison["claim"].str.rsplit("-", n=1).str[0])
    published = published.pivot(index="step", columns="unit", values="published")
    mark_published(axes, published["ops/byte"], published["ops/s"] / 1e9, "published, A6000")
    for step, text in STEPS.items():
        where = dense.loc[dense["operation"] == step, "intensity"].iloc[0]
        axes.axvline(where, color="gray", linewidth=0.6, linestyle=":")
        axes.text(where, 1.02, f" {text}", rotation=35, fontsize=8, transform=axes.get_xaxis_transform())
    axes.set(xlabel="operations per byte", ylabel="attainable, 10⁹ operations/s", xlim=(0.1, 1000))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=2)
    return figure
