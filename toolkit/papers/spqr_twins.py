"""SpQR figure 4.3, further: whole models of random weights here, beside llama.cpp and other ways to save bytes."""

from collections.abc import Sequence

import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.machines.machine import GB
from toolkit.measure.twin_forward import Twin
from toolkit.papers.spqr_kernels import MINE

RIVAL = "llama.cpp Q3_K"  # the other program's type of the fewest bits
TITLES = {"dram": "All layers in memory", "storage": "Every layer from the disk"}
LABELS = {"spqr": "SpQR, CSR", "spqr_ptcsr": "SpQR, PTCSR", "endor": "Endor"}


def twin_passes(turns: pd.DataFrame, twin: Twin) -> pd.DataFrame:
    """A row a way and place, from `twin_measurements`: median_s, minimum_s and maximum_s of a token, over the turns.

    bits_per_weight are those of the decoder linears; gb_s the bytes of linears and head over the median. `over_rival`
    is the seconds of `RIVAL` over this way's in the same turn: the median, NaN where it did not run.
    """
    groups = turns.groupby(["place", "way"], sort=False)
    seconds = groups["seconds"].agg(["median", "min", "max"])
    table = seconds.rename(columns={"median": "median_s", "min": "minimum_s", "max": "maximum_s"})
    table = table.join(groups[["layer_bytes", "weights", "head_bytes", "mode"]].first()).reset_index()
    table["bits_per_weight"] = 8 * table["layer_bytes"] / table["weights"]
    table["gb_s"] = (table["layer_bytes"] + table["head_bytes"]) / GB / table["median_s"]
    table["over_rival"] = [_over_rival(turns, row.place, row.way) for row in table.itertuples()]
    table = table.rename(columns={"way": "method"})
    return table.assign(profile=MINE, model=twin.model, layers=twin.layers, evidence="measured")


def _over_rival(turns: pd.DataFrame, place: str, way: str) -> float:
    rows = turns[turns["place"] == place].pivot_table(index="repetition", columns="way", values="seconds")
    return float((rows[RIVAL] / rows[way]).median()) if RIVAL in rows else float("nan")


def twin_figure(tables: Sequence[pd.DataFrame]) -> Figure:
    """Milliseconds a token of each way, a panel for each twin and place; whiskers go over all turns."""
    panels = [rows for table in tables for _, rows in table.groupby("place", sort=False)]
    heights = [len(rows) for rows in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 0.36 * sum(heights) + len(panels)), height_ratios=heights, layout="constrained"
    )
    for each, rows in zip([axes] if len(panels) == 1 else axes, panels, strict=True):
        _draw(each, rows.sort_values("median_s").reset_index(drop=True))
    return figure


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
    ours, theirs = sns.color_palette("colorblind", 2)
    colours = [theirs if name.startswith("llama.cpp") else ours for name in rows["method"]]
    around = [1e3 * (rows["median_s"] - rows["minimum_s"]), 1e3 * (rows["maximum_s"] - rows["median_s"])]
    axes.barh(range(len(rows)), 1e3 * rows["median_s"], 0.7, color=colours, xerr=around, ecolor="0.3")
    names = [f"{LABELS.get(row.method, row.method)}, {row.bits_per_weight:.1f} bits" for row in rows.itertuples()]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    first = rows.iloc[0]
    axes.set(
        xlabel="ms a token (measured)", title=f"{first['model']}, {first['layers']} layers. {TITLES[first['place']]}"
    )


def twin_sentence(tables: Sequence[pd.DataFrame]) -> str:
    """SpQR's milliseconds a token and bits, and how many times as fast as llama.cpp it is, for each twin and place."""
    parts = []
    for table in tables:
        for place, rows in table.groupby("place", sort=False):
            spqr = rows[rows["method"].str.startswith("spqr")].sort_values("median_s").iloc[0]
            said = f"{spqr['model']}, {spqr['layers']} layers, {TITLES[place].lower()}: {LABELS[spqr['method']]} takes "
            said += f"{1e3 * spqr['median_s']:.1f} ms a token at {spqr['bits_per_weight']:.2f} bits a weight"
            if spqr["over_rival"] == spqr["over_rival"]:
                rival = rows.set_index("method").loc[RIVAL]
                said += f", {spqr['over_rival']:.2f} times as fast as {RIVAL} at {rival['bits_per_weight']:.2f} bits"
            parts.append(said)
    return "; ".join(parts) + "."
