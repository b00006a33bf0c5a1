"""SpQR figure 4.3: a whole forward pass, measured on this machine and modelled on the thesis' GPUs."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from toolkit.evidence.figures import HATCHES, first_on_top, mark_published
from toolkit.machines.machine import GB, Memory
from toolkit.models.shapes import twin_shapes
from toolkit.papers.spqr_kernels import MINE
from toolkit.papers.spqr_tile import BLOCKS

DENSE, CSR, PTCSR = "dense", "spqr_packed", "spqr_ptcsr_packed"
NAMES = {DENSE: "dense", CSR: "SpQR, CSR", PTCSR: "SpQR, PTCSR"}
VOCABULARY = {"llama2-7b": (32000, 4096)}  # the head, which is not quantised
STATISTICS = ("minimum_s", "mean_s", "median_s")


def measured_passes(tokens: pd.DataFrame, model: str) -> pd.DataFrame:
    """A row a method, from `forward_measurements`: minimum_s, mean_s and median_s of a pass, over all repetitions.

    speedup is the dense median over this one, of the same repetition: its median, with speedup_low and speedup_high,
    the least and the most. byte_limit is the dense bytes over this one's; gb_s the bytes over the median.
    """
    groups = tokens.groupby("method", sort=False)["seconds"]
    table = pd.DataFrame({"minimum_s": groups.min(), "mean_s": groups.mean(), "median_s": groups.median()})
    table["weight_bytes"] = tokens.groupby("method", sort=False)["weight_bytes"].first()
    medians = tokens.pivot_table(index="repetition", columns="method", values="seconds", aggfunc="median")
    ratios = medians[[DENSE]].to_numpy() / medians[table.index]
    table = table.assign(speedup=ratios.median(), speedup_low=ratios.min(), speedup_high=ratios.max())
    return _finished(table.reset_index(), "median_s").assign(profile=MINE, model=model, evidence="measured")


def stored_bits(tokens: pd.DataFrame) -> dict[str, float]:
    """Bits a weight of the decoder linears, by method, from `forward_measurements`."""
    first = tokens.groupby("method", sort=False)[["linear_bytes", "weights"]].first()
    return (8 * first["linear_bytes"] / first["weights"]).to_dict()


def modelled_passes(
    bits: Mapping[str, float], model: str, machines: Mapping[str, Memory], dense_on: str
) -> pd.DataFrame:
    """A row a machine and method, with minimum_s: the bytes of all weights and of the head, over the bandwidth.

    `bits` a weight of the decoder linears, by method. Nothing else takes time: no attention, no launches. The dense
    model is asked for on the machine `dense_on` alone, since the other one cannot hold it.
    """
    weights = BLOCKS[model] * sum(rows * columns for rows, columns in twin_shapes(model).values())
    head_bytes = 2 * np.prod(VOCABULARY[model])
    tables = []
    for name, memory in machines.items():
        table = pd.DataFrame(
            {"method": list(bits), "weight_bytes": [weights * b / 8 + head_bytes for b in bits.values()]}
        )
        table["minimum_s"] = table["weight_bytes"] / GB / memory.bandwidth_gb_s
        table["speedup"] = table.loc[table["method"] == DENSE, "minimum_s"].item() / table["minimum_s"]
        table = _finished(table, "minimum_s").assign(profile=name)
        tables.append(table if name == dense_on else table[table["method"] != DENSE])
    return pd.concat(tables, ignore_index=True).assign(model=model, evidence="modelled")


def _finished(table: pd.DataFrame, seconds: str) -> pd.DataFrame:
    dense = table.loc[table["method"] == DENSE, "weight_bytes"].item()
    return table.assign(byte_limit=dense / table["weight_bytes"], gb_s=table["weight_bytes"] / table[seconds] / GB)


def forward_figure(table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:
    """Milliseconds of a pass here, and the least that bytes allow on the thesis' GPUs beside what it published."""
    figure, (mine, theirs) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    _draw_mine(mine, table[table["profile"] == MINE])
    rows = table[table["profile"] != MINE].reset_index(drop=True)
    published = comparison[comparison["claim"].str.endswith("-minimum")].set_index("claim")["published"]
    colours = dict(zip(NAMES, sns.color_palette("colorblind", len(NAMES)), strict=True))
    for place, row in rows.iterrows():
        style = {"color": colours[row["method"]], "hatch": HATCHES["modelled"], "edgecolor": "white"}
        theirs.barh(place, 1e3 * row["minimum_s"], 0.6, **style)
        claim = f"fig4_3-{CLAIMED[row['profile']]}-{CLAIMED[row['method']]}-minimum"
        if claim in published:
            mark_published(theirs, [1e3 * published[claim]], [place], "published" if not place else "_nolegend_")
    names = [f"{CLAIMED[row.profile].upper()}, {NAMES[row.method]}" for row in rows.itertuples()]
    theirs.set_yticks(range(len(rows)), names)
    first_on_top(theirs)
    theirs.set(xlabel="ms a forward pass", title="Llama 2 7B: what bytes allow (modelled)")
    keys = [Patch(facecolor="gray", hatch=HATCHES["modelled"], edgecolor="white", label="modelled")]
    theirs.legend(handles=[*keys, *theirs.get_legend_handles_labels()[0]], fontsize=8, loc="upper right")
    return figure


CLAIMED = {"spqr-a100": "a100", "spqr-rtx4060-mobile": "rtx4060", DENSE: "fp16", CSR: "csr", PTCSR: "ptcsr"}


def _draw_mine(axes: plt.Axes, rows: pd.DataFrame) -> None:
    width = 0.26
    for number, statistic in enumerate(STATISTICS):
        places = np.arange(len(rows)) + width * (number - 1)
        label = statistic.removesuffix("_s")
        axes.bar(places, 1e3 * rows[statistic], 0.92 * width, color=f"C{number}", label=label)
    axes.set_xticks(range(len(rows)), [NAMES[method] for method in rows["method"]])
    axes.set(ylabel="ms a forward pass", title=f"{rows['model'].iloc[0]} on this machine (measured)")
    axes.legend(fontsize=8, loc="upper right", ncols=3)
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])


def forward_sentence(table: pd.DataFrame) -> str:
    """How much of what bytes allow a whole pass keeps, here and in the thesis."""
    mine = table[table["profile"] == MINE].set_index("method")
    other = table[table["profile"].ne(MINE) & table["method"].eq(CSR)].set_index("profile")
    said = ", ".join(f"{name} {1e3 * row.minimum_s:.1f} ms" for name, row in other.iterrows())
    return (
        f"a token of {mine['model'].iloc[0]} takes {1e3 * mine.loc[DENSE, 'median_s']:.1f} ms with dense weights, "
        f"{1e3 * mine.loc[CSR, 'median_s']:.1f} ms with SpQR in CSR and {1e3 * mine.loc[PTCSR, 'median_s']:.1f} ms in "
        f"PTCSR (medians, measured): {mine.loc[CSR, 'speedup']:.2f} and {mine.loc[PTCSR, 'speedup']:.2f} times as "
        f"fast, where bytes would allow {mine.loc[CSR, 'byte_limit']:.2f} and {mine.loc[PTCSR, 'byte_limit']:.2f}. For "
        f"Llama 2 7B in CSR bytes alone would take (modelled): {said}."
    )
