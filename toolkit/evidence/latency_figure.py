"""The figure of a latency notebook: where the time goes, machine by machine, and what was published beside it."""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from toolkit.evidence.figures import COLUMN_IN, HATCHES, PUBLISHED, SUMS, comparison_bars, stacked_bars, stage_colours

BAR_IN, FRAME_IN = 0.27, 0.55  # height of a bar, and of what stands around a panel
RATIOS = ("ratio", "speedup")
OVERLAPPING = 0.99  # a total below this share of its stages together
TOTAL = {"color": "black", "linewidth": 2, "solid_capstyle": "butt"}


def machines_figure(table: pd.DataFrame, comparison: pd.DataFrame, bar: str = "way") -> Figure:
    """A panel of stacked stages for every machine, then one of our ratios and speed-ups beside the published ones.

    Args:
        table: rows of `Timeline.stages()` with `profile`, `model`, `evidence` and the column `bar` (`way_names`, say).
            Where a machine's bar was both measured and modelled, the modelled one stands below.
        comparison: of `compare_machines`; claims of other units, and such as nothing here answers to, are left out.
    """
    panels = {name: _paired(rows, bar) for name, rows in table.groupby("profile", sort=False)}
    ratios = comparison[comparison["unit"].isin(RATIOS) & comparison["ours"].notna()]
    counts = [rows[bar].nunique() for rows in panels.values()] + [len(ratios)] * bool(len(ratios))
    heights = [BAR_IN * count + FRAME_IN for count in counts]
    figure, axes = plt.subplots(
        len(heights),
        figsize=(COLUMN_IN, sum(heights) + BAR_IN),
        height_ratios=counts,
        layout="constrained",
        squeeze=False,
    )
    for place, (name, rows) in zip(axes.flat, panels.items(), strict=False):
        stacked_bars(place, rows, bar)
        place.get_legend().remove()
        models, kinds = (list(dict.fromkeys(rows[column])) for column in ("model", "evidence"))
        about = models if len(models) == 1 else []  # the bars say which, if there are several
        place.set_title(", ".join([name, *about, " and ".join(kinds)]))
        _mark_totals(place, rows, bar)
    if len(ratios):
        _ratios(axes.flat[-1], ratios, first=comparison["profile"].iloc[0])
    stage_legend(figure, table, published=len(ratios) > 0)
    return figure


def _paired(rows: pd.DataFrame, bar: str) -> pd.DataFrame:
    """Bars in their order, what was measured of each before what was modelled, which is called so then."""
    if set(rows["evidence"]) != {"measured", "modelled"}:
        return rows
    places = {name: number for number, name in enumerate(dict.fromkeys(rows[bar]))}
    rows = rows.sort_values("evidence", kind="stable").sort_values(
        bar, key=lambda names: names.map(places), kind="stable"
    )
    return rows.assign(**{bar: rows[bar].where(rows["evidence"] == "measured", rows[bar] + ", modelled")})


def _mark_totals(axes: Axes, rows: pd.DataFrame, bar: str) -> None:
    """A line at the total of each bar whose stages overlap: they are stacked, so its length is no time."""
    seconds = rows[~rows["stage"].isin(SUMS)].groupby(bar, sort=False)["seconds"].sum()
    totals = rows[rows["stage"] == "total"].set_index(bar)["seconds"].reindex(seconds.index)
    for place, (stacked, total) in enumerate(zip(seconds, totals, strict=True)):
        if total < OVERLAPPING * stacked:
            axes.plot([total, total], [place - 0.45, place + 0.45], label="total, where stages overlap", **TOTAL)


def _ratios(axes: Axes, ratios: pd.DataFrame, first: str) -> None:
    short = ratios["claim"].str.split("-", n=1).str[1]
    machine = (", " + ratios["profile"]).where(ratios["profile"] != first, "")
    comparison_bars(axes, ratios.assign(conditions=short + machine))
    axes.set(title="beside the published ratios", xlabel="ratio")
    axes.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.get_legend().remove()
    for patch in axes.patches:  # no stage's colour
        patch.set_facecolor("0.65")


def stage_legend(figure: Figure, table: pd.DataFrame, published: bool = False) -> None:
    """One legend for all panels: the stages of the table, `modelled` if some are, and the published marks."""
    keys = [Patch(color=colour, label=stage) for stage, colour in stage_colours(table["stage"]).items()]
    if "modelled" in set(table["evidence"]):
        keys.append(Patch(facecolor="gray", hatch=HATCHES["modelled"], edgecolor="white", label="modelled"))
    if published:
        keys.append(Line2D([], [], label="published", **PUBLISHED))
    lines = [line for axes in figure.axes for line in axes.lines if str(line.get_label()).startswith("total")]
    figure.legend(handles=[*keys, *lines[:1]], loc="outside lower left", ncols=4)
