"""One look for all figures: colours that a colour-blind reader tells apart, text readable at a paper's column width."""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from toolkit.files import replacing
from toolkit.measure.disturbance import STAR, count_disturbed, disturbance_words, starred
from toolkit.timeline import STAGES

COLUMN_IN = 6.4  # inches; printed at the 3.3 inches of a column, the text is still 5 pt
GOLDEN = 0.62
LABEL_WIDTH = 52  # characters of a claim in a line
CLAUSES = re.compile(r"\s*[;(]")  # what follows is a remark on the claim
LEGEND_COLUMNS = 3  # as many as fit under a figure of that width
PUBLISHED = {
    "marker": "D",
    "markersize": 7,
    "markerfacecolor": "none",
    "markeredgecolor": "black",
    "markeredgewidth": 1.4,
    "linestyle": "none",
    "zorder": 5,
}
WHISKER = {"color": "black", "linewidth": 1.2, "marker": "|", "markersize": 6, "zorder": 4}
RANGE = "range: least to most"
SUMS = ("transfer", "total")  # of stages
HATCHES = {"measured": "", "modelled": "///"}  # and none where published
BAR_IN, CLAIM_IN, FRAME_IN = 0.27, 0.36, 0.55  # height of a bar, of a claim's, and of what stands around a panel
RATIOS = ("ratio", "speedup")
OVERLAPPING = 0.99  # a total below this share of its stages together
OVERLAPPED = "total, where stages overlap"
TOTAL = {"color": "black", "linewidth": 2, "solid_capstyle": "butt"}


def use_style() -> None:
    """Set matplotlib and seaborn for the notebook that calls it."""
    sns.set_theme(
        context="notebook",
        style="ticks",
        palette="colorblind",
        rc={
            "figure.figsize": (COLUMN_IN, COLUMN_IN * GOLDEN),
            "figure.dpi": 100,
            "savefig.dpi": 200,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "grid.color": "#e4e7ec",
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 10,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "lines.linewidth": 1.6,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "svg.hashsalt": "toolkit",
            "svg.fonttype": "none",
        },
    )


def note_disturbance(figure: Figure, table: pd.DataFrame) -> None:
    """Say above a figure how many rows of its notebook's table other work disturbed, if any."""
    count, known = count_disturbed(table)
    if count:
        words = f"{STAR.strip()}  {disturbance_words(count, known)}"
        # not below: saved with a tight box, a legend at the lower edge moves over what stands there
        figure.text(0.01, 1.01, words, va="bottom", fontsize=9)


def save_figure(figure: Figure, stem: Path) -> None:
    """Save a figure as SVG and PNG, `stem` with a suffix."""
    for suffix in (".svg", ".png"):
        with replacing(stem.with_name(stem.name + suffix)) as path:
            figure.savefig(path, bbox_inches="tight")


def mark_published(axes: Axes, x, y, label: str = "published") -> None:
    """Hollow black diamonds for the paper's own numbers, the same mark in every figure."""
    axes.plot(x, y, label=label, **PUBLISHED)


def first_on_top(axes: Axes) -> None:
    """Dress horizontal bars, once all are drawn: the first one on top, and grid lines at the values only."""
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")


def whiskers(axes: Axes, lows: Iterable[float], highs: Iterable[float]) -> None:
    """A whisker from low to high on each horizontal bar, the first on top; none where either is NaN."""
    ends = [(place, low, high) for place, (low, high) in enumerate(zip(lows, highs, strict=True))]
    known = [(place, low, high) for place, low, high in ends if low < high]
    for number, (place, low, high) in enumerate(known):
        axes.plot([low, high], [place, place], label=RANGE if not number else "_nolegend_", **WHISKER)


def claim_labels(comparison: pd.DataFrame) -> list[str]:
    """The subject of each claim, in lines for an axis: the first of its conditions."""
    return [textwrap.fill(CLAUSES.split(words)[0], LABEL_WIDTH) for words in comparison["conditions"]]


def comparison_bars(axes: Axes, comparison: pd.DataFrame, colour: str = "C0") -> None:
    """Our numbers as bars (hatched where modelled), the published ones as diamonds, from what `compare` returns.

    One bar a claim, labelled by its conditions; a claim that was not run shows its diamond alone.
    """
    places = range(len(comparison))
    for place, row in zip(places, comparison.itertuples(), strict=True):
        if row.ours is not None and not pd.isna(row.ours):
            axes.barh(place, row.ours, color=colour, height=0.6, hatch=HATCHES.get(row.evidence, ""), edgecolor="white")
    mark_published(axes, comparison["published"], list(places))
    axes.set_yticks(list(places), claim_labels(comparison), fontsize=7.5)
    first_on_top(axes)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1))  # above the bars, beside the title


def evidence_bars(
    axes: Axes, table: pd.DataFrame, value: str, block: str, bar: str, blocks: Sequence[str] = ()
) -> None:
    """Horizontal bars on a log axis: a block a value of column `block`, in it a colour a value of `bar`.

    A bar is hatched where its row's `evidence` is modelled. Bars and blocks stand in the order of the table. `blocks`
    gives the blocks another order, so that several axes can share one; a block without rows stays empty.
    """
    bars = list(dict.fromkeys(table[bar]))
    colours = dict(zip(bars, sns.color_palette("colorblind", len(bars)), strict=True))
    blocks = list(blocks) or list(dict.fromkeys(table[block]))
    height = 0.8 / len(bars)
    for place, name in enumerate(blocks):
        rows = table[table[block] == name]
        for number, row in enumerate(rows.to_dict("records")):
            middle = place + height * (number - (len(rows) - 1) / 2)
            style = {"color": colours[row[bar]], "hatch": HATCHES.get(row["evidence"], ""), "edgecolor": "white"}
            axes.barh(middle, row[value], height=height, linewidth=0.3, **style)
    axes.set_yticks(range(len(blocks)), blocks)
    axes.set_xscale("log")
    # whole decades: on a narrower axis matplotlib labels what lies between them, and the labels overlap
    low, high = table[value].min(), table[value].max()
    axes.set_xlim(10 ** (math.ceil(math.log10(low)) - 1), 10 ** (math.floor(math.log10(high)) + 1))
    axes.set_ylim(-0.5, len(blocks) - 0.5)
    first_on_top(axes)
    keys = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if "modelled" in set(table["evidence"]):
        keys.append(Patch(facecolor="gray", hatch=HATCHES["modelled"], edgecolor="white", label="modelled"))
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2)


def timeline(axes: Axes, spans: pd.DataFrame, lane: str = "tier", colour: str = "stage") -> None:
    """A Gantt chart of what `Timeline.table()` gives: a row a value of column `lane`, a colour a value of `colour`.

    A span is hatched where its row's `evidence` is modelled. To draw several timelines under each other, concatenate
    their tables with a column that tells them apart, and name that column as `lane`. The colours are `stage_colours`
    if all values are stages.
    """
    lanes, names = (list(dict.fromkeys(spans[column])) for column in (lane, colour))
    colours = stage_colours(names)
    if len(colours) < len(names):
        colours = dict(zip(names, sns.color_palette("colorblind", len(names)), strict=True))
    for name, rows in spans.groupby(colour, sort=False):
        heights = [lanes.index(value) for value in rows[lane]]
        bars = axes.barh(heights, rows["end_s"] - rows["start_s"], left=rows["start_s"], height=0.7, label=name)
        for bar, kind in zip(bars, rows["evidence"], strict=True):
            bar.set(facecolor=colours[name], edgecolor="white", linewidth=0.3, hatch=HATCHES.get(kind, ""))
    axes.set_yticks(range(len(lanes)), lanes)
    first_on_top(axes)
    axes.set_xlabel("seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=LEGEND_COLUMNS)


def stacked_bars(axes: Axes, table: pd.DataFrame, bar: str) -> None:
    """Horizontal bars made of stages: a bar a value of column `bar`, in it the stages' seconds one after the other.

    `table` holds one row for each bar and stage, such as `Timeline.stages()` of several timelines. Its rows `transfer`
    and `total` are sums and are left out. A stage is hatched where its row's `evidence` is modelled. A star follows the
    name of a bar that other work disturbed.
    """
    parts = table.assign(**{bar: starred(table, bar)})[~table["stage"].isin(SUMS)]
    bars = list(dict.fromkeys(parts[bar]))
    places = parts[bar].map(bars.index) * len(STAGES) + parts["stage"].map(STAGES.index)
    parts = parts.iloc[places.argsort(kind="stable")]
    ends = parts.groupby(bar, sort=False)["seconds"].cumsum()
    timeline(axes, parts.assign(start_s=ends - parts["seconds"], end_s=ends), lane=bar)


def stage_colours(names: Iterable[str]) -> dict[str, tuple]:
    """The colour of each stage of a timeline among the names, in the stages' order: the same in every figure."""
    palette = dict(zip(STAGES, sns.color_palette("colorblind", len(STAGES)), strict=True))
    return {name: palette[name] for name in STAGES if name in set(names)}


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
        published_ratios(axes.flat[-1], ratios, first=table["profile"].iloc[0])
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


def published_ratios(axes: Axes, ratios: pd.DataFrame, first: str) -> None:
    """Rows of `compare` with ratios, as `comparison_bars` with their ranges. Machines but the `first` are named."""
    machine = (", " + ratios["profile"]).where(ratios["profile"] != first, "")
    conditions = [CLAUSES.split(words)[0] for words in ratios["conditions"]] + machine
    comparison_bars(axes, ratios.assign(conditions=conditions), colour="0.65")  # no stage's colour
    axes.set(title="beside the published ratios", xlabel="ratio")
    axes.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.get_legend().remove()
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
