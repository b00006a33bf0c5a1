"""One look for all figures: colours that a colour-blind reader tells apart, text readable at a paper's column width.

Colours are places in seaborn's palette "colorblind", chosen by what a mark stands for:

- a stage of a timeline (read, copy, decode, ...): `stage_colours`, its place among `STAGES`;
- a method, format or program (dense, endor, csr, llama.cpp, ...): `colours`, by `COLOURS`; dense weights are gray;
- anything else: `colours`, the places that no method of the figure has, in order of appearance.

Published numbers are hollow black diamonds (`mark_published`). Modelled bars are hatched, measured ones plain. A bar
without a fill is an input: the model was fitted to the published number.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path

import pandas as pd

from toolkit.evidence.comparison import is_fitted
from toolkit.extras import extra
from toolkit.files import replacing
from toolkit.measure.disturbance import STAR, count_disturbed, disturbance_words, starred
from toolkit.timeline import STAGES

with extra("lab"):
    import seaborn as sns
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator, NullLocator

COLUMN_IN = 6.4  # inches; printed at the 3.3 inches of a column, the text is still 5 pt
GOLDEN = 0.62
COLOURS = {  # the start of a name -> its place in the palette
    **{"dense": 7, "endor": 0, "endor_packed": 9, "csr": 3, "ptcsr": 1, "spqr": 2, "two_four": 1},
    **{"zstd": 5, "huffman": 8, "accelerate": 4, "llama.cpp": 8},
}
SHARED = 0.7  # share of the claims that have a condition, above which their labels leave it out
LABEL_WIDTH = 42  # characters of a claim in a line
BOUND = re.compile(r"(at least|at most|about|up to): ")
CLAUSES = re.compile(r"\s*[;(]")  # a remark on the claim follows
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
MARKERS = {"measured": "o", "modelled": "o", "published": "D"}
BAR_IN, FRAME_IN = 0.29, 0.55  # height of a bar, and of what stands around a panel
CLAIM = 2  # bars that a claim with its long name takes
RATIOS = ("ratio", "speedup")
OVERLAPPING = 0.99  # a total below this share of its stages together
OVERLAPPED = "total, where stages overlap"
BYTES = "bytes alone"
TOTAL = {"color": "black", "linewidth": 2, "solid_capstyle": "butt"}
FITTED = Patch(facecolor="none", hatch=HATCHES["modelled"], edgecolor="0.65", label="an input, fitted")
ROOM = 1.3  # width of an axis over its longest bar, for the numbers at the ends


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


def label_log_axis(axis: Axis, *multiples: float) -> None:
    """Label a logarithmic axis at these multiples of the powers of ten, and nowhere else."""
    axis.set(major_locator=LogLocator(subs=multiples), major_formatter="{x:g}", minor_locator=NullLocator())


def whiskers(axes: Axes, lows: Iterable[float], highs: Iterable[float]) -> None:
    """A whisker from low to high on each horizontal bar, the first on top; none where either is NaN."""
    ends = [(place, low, high) for place, (low, high) in enumerate(zip(lows, highs, strict=True))]
    known = [(place, low, high) for place, low, high in ends if low < high]
    for number, (place, low, high) in enumerate(known):
        axes.plot([low, high], [place, place], label=RANGE if not number else "_nolegend_", **WHISKER)


def colours(names: Iterable[str]) -> dict[str, tuple]:
    """The colour of each name, in order: a method's is the same in every figure, others take those that are free."""
    palette, names = sns.color_palette("colorblind"), list(dict.fromkeys(names))
    starts = sorted(COLOURS, key=len)  # the longest start decides
    known = {name: COLOURS[start] for name in names for start in starts if name.startswith(start)}
    free = [place for place in range(len(palette)) if place not in known.values()]
    places = known | dict(zip([name for name in names if name not in known], cycle(free), strict=False))
    return {name: palette[places[name]] for name in names}


def claim_labels(comparison: pd.DataFrame) -> list[str]:
    """The subject of each claim, in lines for an axis: its quantity and conditions, but those that most share."""
    words = [BOUND.sub("", CLAUSES.split(text)[0]).split(", ") for text in comparison["conditions"]]
    count = Counter(clause for each in words for clause in set(each))
    several = comparison["claim"].nunique() > 1
    most = SHARED * len(words) if several else len(words)
    rests = [", ".join(clause for clause in each if count[clause] <= most) for each in words]
    bounds = [f" ({found[1]})" if (found := BOUND.match(text)) else "" for text in comparison["conditions"]]
    if several and comparison["quantity"].nunique() == 1:
        labels = [f"{rest}{bound}".strip() for rest, bound in zip(rests, bounds, strict=True)]
    else:
        subjects = zip(comparison["quantity"], bounds, rests, strict=True)
        labels = [f"{name}{bound}: {rest}".removesuffix(": ") for name, bound, rest in subjects]
    return [textwrap.fill(label, LABEL_WIDTH, break_on_hyphens=False) for label in labels]


def value_bars(axes: Axes, table: pd.DataFrame, value: str, labels: Sequence[str], faces: Sequence) -> None:
    """Horizontal bars with their numbers at the ends: one per row, the first on top, hatched where modelled.

    Args:
        table: columns `value` (NaN or None: no bar) and evidence. If known, `value`_low and `value`_high become
            whiskers, limit a line across the bar (`BYTES`), published a diamond; bars that are fitted have no fill.
        labels: a name per bar.
        faces: a colour per bar.
    """
    places, numbers = range(len(table)), table[value].astype(float)
    marks = [name for name in (value, f"{value}_high", "limit", "published") if name in table]
    ends = table[marks].astype(float).max(axis=1)
    hollow = table["fitted"] if "fitted" in table else [False] * len(table)
    rows = zip(places, numbers, ends, table["evidence"], faces, hollow, strict=True)
    for place, number, end, kind, face, is_hollow in rows:
        if pd.notna(number):
            look = {"facecolor": "none", "edgecolor": face} if is_hollow else {"facecolor": face, "edgecolor": "white"}
            axes.barh(place, number, height=0.6, hatch=HATCHES.get(kind, ""), **look)
            number_at(axes, f"{number:.3g}", end, place)
    axes.set_yticks(places, labels)
    first_on_top(axes)
    if "limit" in table:
        ticks = [(place - 0.42, place + 0.42) for place in places]
        axes.plot(table[["limit", "limit"]].to_numpy(float).T, list(zip(*ticks, strict=True)), **TOTAL)
        axes.lines[-1].set_label(BYTES)
    if f"{value}_low" in table:
        whiskers(axes, table[f"{value}_low"].astype(float), table[f"{value}_high"].astype(float))
    if "published" in table:
        mark_published(axes, table["published"], places)


def number_at(axes: Axes, words: str, end: float, place: float) -> None:
    """Words behind the end of a horizontal bar, and room for them."""
    axes.annotate(words, (end, place), (8, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlim(right=max(axes.get_xlim()[1], ROOM * end))


def comparison_bars(axes: Axes, comparison: pd.DataFrame, colour: str = "C0") -> None:
    """Our numbers as `value_bars`, the published ones as diamonds, from what `compare` returns.

    One bar a claim, labelled by `claim_labels`; a claim that was not run shows its diamond alone.
    """
    rows = comparison.assign(fitted=is_fitted(comparison))
    value_bars(axes, rows, "ours", claim_labels(comparison), [colour] * len(rows))
    axes.tick_params("y", labelsize=8)
    keys = [*axes.get_legend_handles_labels()[0], *[FITTED] * bool(rows["fitted"].any())]
    axes.legend(handles=keys, loc="lower right", bbox_to_anchor=(1, 1))  # above the bars, beside the title


def ratio_panels(table: pd.DataFrame, value: str, xlabel: str) -> Figure:
    """A panel of `value_bars` for each machine (`profile`): a bar a row, named by `way`, in its method's colour."""
    panels = dict(tuple(table.groupby("profile", sort=False)))
    figure, axes = _panels([len(rows) for rows in panels.values()], sharex=True)
    faces = colours(table["method"])
    for place, (name, rows) in zip(axes, panels.items(), strict=True):
        value_bars(place, rows, value, list(rows["way"]), list(rows["method"].map(faces)))
        place.axvline(1, color="gray", linewidth=0.8, linestyle=":")
        place.set_title(", ".join([name, *dict.fromkeys(rows["evidence"])]), loc="right")
    axes[-1].set_xlabel(xlabel)
    keys = {label: line for place in axes for line, label in zip(*place.get_legend_handles_labels(), strict=True)}
    if "fitted" in table and table["fitted"].any():
        keys[FITTED.get_label()] = FITTED
    figure.legend(list(keys.values()), list(keys), loc="outside lower left", ncols=LEGEND_COLUMNS)
    return figure


def _panels(bars: Sequence[float], sharex: bool = False) -> tuple[Figure, list[Axes]]:
    """Panels below each other, with heights for so many horizontal bars."""
    heights = [BAR_IN * count + FRAME_IN for count in bars]
    figure, axes = plt.subplots(
        len(heights),
        figsize=(COLUMN_IN, sum(heights) + BAR_IN),
        height_ratios=heights,
        layout="constrained",
        sharex=sharex,
        squeeze=False,
    )
    return figure, list(axes.flat)


def evidence_dots(axes: Axes, table: pd.DataFrame, value: str, block: str, dot: str) -> None:
    """Dots on a log axis: a line a value of column `block`, on it a colour a value of `dot`.

    A dot is hollow where its row's `evidence` is modelled, a diamond where it is published. Dots and blocks stand in
    the order of the table.
    """
    faces, blocks = colours(table[dot]), list(dict.fromkeys(table[block]))
    for place, name in enumerate(blocks):
        rows = table[table[block] == name]
        for number, row in enumerate(rows.to_dict("records")):
            middle = place + 0.8 / len(faces) * (number - (len(rows) - 1) / 2)
            face = "white" if row["evidence"] == "modelled" else faces[row[dot]]
            style = {"color": faces[row[dot]], "markerfacecolor": face, "markersize": 6, "clip_on": False}
            axes.plot(row[value], middle, MARKERS[row["evidence"]], **style)
    axes.set_yticks(range(len(blocks)), blocks)
    axes.set_xscale("log")
    # whole decades: on a narrower axis matplotlib labels what lies between them, and the labels overlap
    low, high = table[value].min(), table[value].max()
    axes.set_xlim(10 ** (math.ceil(math.log10(low)) - 1), 10 ** (math.floor(math.log10(high)) + 1))
    axes.set_ylim(-0.5, len(blocks) - 0.5)
    first_on_top(axes)
    keys = [Patch(color=colour, label=name) for name, colour in faces.items()]
    kinds = [kind for kind in MARKERS if kind in set(table["evidence"])]
    looks = {kind: "white" if kind == "modelled" else "gray" for kind in kinds}
    keys += [Line2D([], [], ls="", marker=MARKERS[kind], color="gray", mfc=looks[kind], label=kind) for kind in kinds]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2)


def timeline(axes: Axes, spans: pd.DataFrame, lane: str = "tier", colour: str = "stage") -> None:
    """A Gantt chart of what `Timeline.table()` gives: a row a value of column `lane`, a colour a value of `colour`.

    A span is hatched where its row's `evidence` is modelled; in a lane with measured spans, too, it is a thin bar below
    them. To draw several timelines under each other, concatenate their tables with a column that tells them apart, and
    name that column as `lane`. The colours are `stage_colours` if all values are stages, else `colours`.
    """
    lanes, names = (list(dict.fromkeys(spans[column])) for column in (lane, colour))
    faces = stage_colours(names)
    if len(faces) < len(names):
        faces = colours(names)
    both = spans.groupby(lane)["evidence"].transform("nunique") > 1
    thin = both & spans["evidence"].eq("modelled")
    places = spans[lane].map(lanes.index) + 0.29 * thin - 0.12 * (both & ~thin)
    spans = spans.assign(place=places, height=(0.7 - 0.24 * both).where(~thin, 0.24))
    for name, rows in spans.groupby(colour, sort=False):
        seconds, height = rows["end_s"] - rows["start_s"], rows["height"]
        bars = axes.barh(rows["place"], seconds, left=rows["start_s"], height=height, label=name)
        for bar, kind in zip(bars, rows["evidence"], strict=True):
            bar.set(facecolor=faces[name], edgecolor="white", linewidth=0.3, hatch=HATCHES.get(kind, ""))
    axes.set_yticks(range(len(lanes)), lanes)
    first_on_top(axes)
    axes.set_xlabel("seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=LEGEND_COLUMNS)


def stacked_bars(axes: Axes, table: pd.DataFrame, bar: str) -> None:
    """Horizontal bars made of stages: a bar a value of column `bar`, in it the stages' seconds one after the other.

    `table` holds one row for each bar and stage, such as `Timeline.stages()` of several timelines. Its rows `transfer`
    and `total` are sums and are left out. Modelled stages are drawn as in `timeline`. A star follows the name of a bar
    that other work disturbed.
    """
    names = zip(table[bar], starred(table, bar), strict=True)
    parts = table.replace({bar: {name: marked for name, marked in names if name != marked}})
    parts = parts[~parts["stage"].isin(SUMS)]
    bars = list(dict.fromkeys(parts[bar]))
    places = parts[bar].map(bars.index) * len(STAGES) + parts["stage"].map(STAGES.index)
    parts = parts.iloc[places.argsort(kind="stable")]
    ends = parts.groupby([bar, "evidence"], sort=False)["seconds"].cumsum()
    timeline(axes, parts.assign(start_s=ends - parts["seconds"], end_s=ends), lane=bar)


def stage_colours(names: Iterable[str]) -> dict[str, tuple]:
    """The colour of each stage of a timeline among the names, in the stages' order: the same in every figure."""
    palette = dict(zip(STAGES, sns.color_palette("colorblind", len(STAGES)), strict=True))
    return {name: palette[name] for name in STAGES if name in set(names)}


def machines_figure(table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:
    """A panel of stacked stages for every machine, then one of our ratios and speed-ups beside the published ones.

    Args:
        table: rows of `Timeline.stages()` with `profile`, `model`, `evidence` and `way`, a bar each.
            Where a machine's way was both measured and modelled, the modelled one is the thin bar. The total stands at
            the end of a bar, with `speedup` behind it if the table has it. Columns seconds_low and seconds_high become
            whiskers at a total, `ours_low` and `ours_high` of the comparison at a ratio. They are what all repetitions
            lie between (measured), or what the profile's ranges make of a number (modelled).
        comparison: of `compare`. Claims in other units, and those without a number of ours, are left out.
    """
    panels = dict(tuple(table.groupby("profile", sort=False)))
    ratios = comparison[comparison["unit"].isin(RATIOS) & comparison["ours"].notna()]
    bars = [rows["way"].nunique() for rows in panels.values()]
    figure, axes = _panels(bars + [CLAIM * len(ratios)] * bool(len(ratios)))
    for place, (name, rows) in zip(axes, panels.items(), strict=False):
        stacked_bars(place, rows, "way")
        place.get_legend().remove()
        models, kinds = list(dict.fromkeys(rows["model"])), [kind for kind in HATCHES if kind in set(rows["evidence"])]
        about = models if len(models) == 1 else []  # the bars say which, if there are several
        place.set_title(", ".join([name, *about, " and ".join(kinds)]), loc="right")  # over the bars' names
        _mark_totals(place, rows)
    if len(ratios):
        published_ratios(axes[-1], ratios, first=table["profile"].iloc[0])
    stage_legend(figure, table, ratios)
    return figure


def _mark_totals(axes: Axes, rows: pd.DataFrame) -> None:
    """The total of each way at the end of its bar; a line where stages overlap, since a bar's length is no time then.

    Measured totals, where a way was measured.
    """
    kinds = rows.groupby("way")["evidence"].transform("nunique")
    rows = rows[rows["evidence"].eq("measured") | kinds.eq(1)]
    seconds = rows[~rows["stage"].isin(SUMS)].groupby("way", sort=False)["seconds"].sum()
    totals = rows[rows["stage"] == "total"].set_index("way").reindex(seconds.index)
    for place, (stacked, total) in enumerate(zip(seconds, totals.to_dict("records"), strict=True)):
        if total["seconds"] < OVERLAPPING * stacked:
            axes.plot([total["seconds"]] * 2, [place - 0.45, place + 0.45], label=OVERLAPPED, **TOTAL)
        if total["seconds"] > 0:
            unit, factor = ("s", 1) if total["seconds"] >= 1 else ("ms", 1e3)
            faster = f", {total['speedup']:.2f} ×" if abs(total.get("speedup", 1) - 1) > 1e-9 else ""
            end = max(stacked, total["seconds"], total.get("seconds_high", 0))
            number_at(axes, f"{factor * total['seconds']:.3g} {unit}{faster}", end, place)
    if "seconds_low" in totals:
        whiskers(axes, totals["seconds_low"], totals["seconds_high"])
    if "speedup" in totals:
        axes.set_xlabel("seconds (×: times as fast as dense weights)")


def published_ratios(axes: Axes, ratios: pd.DataFrame, first: str) -> None:
    """Rows of `compare` with ratios, as `comparison_bars` with their ranges. Machines but the `first` are named."""
    machine = (", " + ratios["profile"]).where(ratios["profile"] != first, "")
    conditions = [CLAUSES.split(words)[0] for words in ratios["conditions"]] + machine
    comparison_bars(axes, ratios.assign(conditions=conditions), colour="0.65")  # no stage's colour
    quantities = set(ratios["quantity"])
    axes.set(xlabel=quantities.pop() if len(quantities) == 1 else "ratio")
    axes.set_title("beside the published ratios", loc="right")
    axes.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.get_legend().remove()


def stage_legend(figure: Figure, table: pd.DataFrame, ratios: pd.DataFrame | None = None) -> None:
    """One legend for all panels: the stages of the table, `modelled` if some are, and marks of published `ratios`."""
    keys = [Patch(color=colour, label=stage) for stage, colour in stage_colours(table["stage"]).items()]
    if "modelled" in set(table["evidence"]):
        keys.append(Patch(facecolor="gray", hatch=HATCHES["modelled"], edgecolor="white", label="modelled"))
    if ratios is not None and len(ratios):
        keys.append(Line2D([], [], label="published", **PUBLISHED))
        if is_fitted(ratios).any():
            keys.append(FITTED)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    keys += [lines[label] for label in (OVERLAPPED, RANGE) if label in lines]
    figure.legend(handles=keys, loc="outside lower left", ncols=LEGEND_COLUMNS)
