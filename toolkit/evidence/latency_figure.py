"""The figure of a latency notebook: where the time goes, machine by machine, and what was published beside it."""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from toolkit.evidence.figures import (
    CLAUSES,
    COLUMN_IN,
    HATCHES,
    LEGEND_COLUMNS,
    PUBLISHED,
    RANGE,
    SUMS,
    comparison_bars,
    stacked_bars,
    stage_colours,
    whiskers,
)

BAR_IN, CLAIM_IN, FRAME_IN = 0.27, 0.36, 0.55  # height of a bar, of a claim's, and of what stands around a panel
RATIOS = ("ratio", "speedup")
OVERLAPPING = 0.99  # a total below this share of its stages together
OVERLAPPED = "total, where stages overlap"
TOTAL = {"color": "black", "linewidth": 2, "solid_capstyle": "butt"}


def machines_figure(table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:
    """A panel of stacked stages for every machine, then one of our ratios and speed-ups beside the published ones.

    Args:
        table: rows of `Timeline.stages()` with `profile`, `model`, `evidence` and `way`, a bar each.
            Where a machine's way was both measured and modelled, the modelled one stands below. Columns seconds_low and
            seconds_high become whiskers at a total, `ours_low` and `ours_high` of the comparison at a ratio. They are
            what all repetitions lie between (measured), or what the profile's ranges make of a number (modelled).
        comparison: of `compare`. Claims in other units, and those without a number of ours, are left out.
    """
    panels = {name: _paired(rows) for name, rows in table.groupby("profile", sort=False)}
    ratios = comparison[comparison["unit"].isin(RATIOS) & comparison["ours"].notna()]
    heights = [BAR_IN * rows["way"].nunique() + FRAME_IN for rows in panels.values()]
    heights += [CLAIM_IN * len(ratios) + FRAME_IN] * bool(len(ratios))
    figure, axes = plt.subplots(
        len(heights),
        figsize=(COLUMN_IN, sum(heights) + BAR_IN),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for place, (name, rows) in zip(axes.flat, panels.items(), strict=False):
        stacked_bars(place, rows, "way")
        place.get_legend().remove()
        models, kinds = (list(dict.fromkeys(rows[column])) for column in ("model", "evidence"))
        about = models if len(models) == 1 else []  # the bars say which, if there are several
        place.set_title(", ".join([name, *about, " and ".join(kinds)]))
        _mark_totals(place, rows)
    if len(ratios):
        _ratios(axes.flat[-1], ratios, first=table["profile"].iloc[0])
    stage_legend(figure, table, published=len(ratios) > 0)
    return figure


def _paired(rows: pd.DataFrame) -> pd.DataFrame:
    """Bars in their order. Where some were measured, modelled ones stand behind them and say so in their name."""
    if set(rows["evidence"]) != {"measured", "modelled"}:
        return rows
    ways = list(dict.fromkeys(rows["way"]))
    places = 2 * rows["way"].map(ways.index) + rows["evidence"].eq("modelled")
    rows = rows.assign(way=rows["way"].where(rows["evidence"] == "measured", rows["way"] + ", modelled"))
    return rows.iloc[places.argsort(kind="stable")]


def _mark_totals(axes: Axes, rows: pd.DataFrame) -> None:
    """A line at the total of each bar whose stages overlap: they are stacked, so the bar's length is no time."""
    seconds = rows[~rows["stage"].isin(SUMS)].groupby("way", sort=False)["seconds"].sum()
    totals = rows[rows["stage"] == "total"].set_index("way").reindex(seconds.index)
    for place, (stacked, total) in enumerate(zip(seconds, totals["seconds"], strict=True)):
        if total < OVERLAPPING * stacked:
            axes.plot([total, total], [place - 0.45, place + 0.45], label=OVERLAPPED, **TOTAL)
    if "seconds_low" in totals:
        whiskers(axes, totals["seconds_low"], totals["seconds_high"])


def _ratios(axes: Axes, ratios: pd.DataFrame, first: str) -> None:
    machine = (", " + ratios["profile"]).where(ratios["profile"] != first, "")
    comparison_bars(
        axes, ratios.assign(conditions=[CLAUSES.split(words)[0] for words in ratios["conditions"]] + machine)
    )
    axes.set(title="beside the published ratios", xlabel="ratio")
    axes.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.get_legend().remove()
    for patch in axes.patches:  # no stage's colour
        patch.set_facecolor("0.65")
    whiskers(axes, ratios["ours_low"].astype(float), ratios["ours_high"].astype(float))


def stage_legend(figure: Figure, table: pd.DataFrame, published: bool = False) -> None:
    """One legend for all panels: the stages of the table, `modelled` if some are, and the published marks."""
    keys = [Patch(color=colour, label=stage) for stage, colour in stage_colours(table["stage"]).items()]
    if "modelled" in set(table["evidence"]):
        keys.append(Patch(facecolor="gray", hatch=HATCHES["modelled"], edgecolor="white", label="modelled"))
    if published:
        keys.append(Line2D([], [], label="published", **PUBLISHED))
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    keys += [lines[label] for label in (OVERLAPPED, RANGE) if label in lines]
    figure.legend(handles=keys, loc="outside lower left", ncols=LEGEND_COLUMNS)
