"""Speed against price under limits of memory: a panel a limit, a mark a way, as `sparse-offload bench` draws it.

    draw(bench("model.gguf", [600_000_000, 1_000_000_000]), Path("speed.png"))

Circles are ways of this toolkit, dark marks other software. Whiskers are the range of the turns and the error of the
price, hollow circles the plan's predictions. The grey line joins the ways that no other way beats in both.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from toolkit.errors import UserError
from toolkit.evidence.figures import COLUMN_IN, colours, label_log_axis, use_style
from toolkit.files import replacing

SHAPES = "XPsD^v*<>p"  # of other software
THEIRS, FRONT = ("0.3", "0.65"), "0.85"
PANEL_IN, LEGEND_IN = 2.5, 0.24
WIDE = 1.3  # times the model's own perplexity: the least that an axis shows
NEAR = 1.1  # a price up to which ways are close to the model
LIGHTER = 0.5  # of a colour that another way has already
UNKNOWN = 1.25  # beyond the last known price, where ways without one stand
PLANNED = {"marker": "o", "linestyle": "none", "markersize": 8, "markerfacecolor": "none", "markeredgecolor": "0.5"}
PLANNED |= {"markeredgewidth": 1.5, "zorder": 2}
HALO = withStroke(linewidth=3, foreground="white")
RANGES = ("tokens_per_s_low", "tokens_per_s_high", "relative_low", "relative_high")
COLUMNS = ("limit_mb", "way", "rival", "tokens_per_s", "relative")


def draw(table: pd.DataFrame, file: Path) -> None:
    """Write the picture of a table, in the format that the file's name says. Raises what `speed_figure` raises."""
    figure = speed_figure(table)
    with replacing(file) as temporary:
        figure.savefig(temporary, format=file.suffix.removeprefix("."), dpi=200, bbox_inches="tight")


def speed_figure(table: pd.DataFrame) -> Figure:
    """The picture of a table, which has a row a way and limit.

    Columns: `COLUMNS` (rival: other software; relative: perplexity over the model's own, NaN if nobody knows it). It
    may have tokens_per_s_low and _high, relative_low and _high, and predicted_per_s with at_best. Rows without a speed
    are left out. Raises `UserError` if none is left.
    """
    table = table[np.isfinite(table["tokens_per_s"].astype(float))]
    if table.empty:
        raise UserError("no way has a speed within these limits: nothing to draw; give more memory")
    use_style()
    limits, styles = sorted(table["limit_mb"].unique()), _styles(table)
    columns = min(2, len(limits))
    rows, handles = -(-len(limits) // columns), _legend(table, styles)
    height = PANEL_IN * rows + LEGEND_IN * -(-len(handles) // 2) + 0.4
    figure = Figure(figsize=(COLUMN_IN if columns > 1 else 0.7 * COLUMN_IN, height), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    edge = max(WIDE, table["relative"].astype(float).max(skipna=True) * 1.04)
    lost = UNKNOWN * edge if table["relative"].isna().any() else None
    for limit, axes in zip(limits, panels.flat, strict=False):
        panel = table[table["limit_mb"].eq(limit)]
        _panel(axes, panel.assign(x=panel["relative"].astype(float).fillna(lost)), styles)
        axes.set_title(f"within {_size(limit)}")
    for axes in panels.flat[len(limits) :]:
        axes.set_visible(False)
    _axes(panels, table, edge, lost)
    for axes in panels[-1] if len(limits) % columns == 0 else [panels[-1, 0], *panels[-2, 1:]]:
        axes.set_xlabel("perplexity over the model's own (log)")
        axes.tick_params(labelbottom=True)
    for axes in panels[:, 0]:
        axes.set_ylabel("tokens a second (log)")
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _panel(axes: Axes, panel: pd.DataFrame, styles: dict[str, dict]) -> None:
    """The marks of one limit, the line of the best ones, and names of the fastest of either side."""
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)
    front = panel[on_front(panel)].sort_values(["x", "tokens_per_s"])
    axes.plot(front["x"], front["tokens_per_s"], color=FRONT, linewidth=4, zorder=0.5, solid_capstyle="round")
    for row in panel.itertuples():
        style = styles[row.way]
        ends = {name: getattr(row, name, np.nan) for name in RANGES}
        if ends["tokens_per_s_low"] < ends["tokens_per_s_high"]:
            axes.vlines(row.x, ends["tokens_per_s_low"], ends["tokens_per_s_high"], color=style["color"], linewidth=1.6)
        if ends["relative_low"] < ends["relative_high"]:
            axes.hlines(
                row.tokens_per_s, ends["relative_low"], ends["relative_high"], color=style["color"], linewidth=1
            )
        predicted = getattr(row, "predicted_per_s", np.nan)
        if predicted == predicted and getattr(row, "at_best", False) != 1:
            axes.plot(row.x, predicted, **PLANNED | {"markeredgecolor": style["color"]})
        axes.plot(row.x, row.tokens_per_s, linestyle="none", zorder=3, **style)
    _name_fastest(axes, panel, styles)


def _name_fastest(axes: Axes, panel: pd.DataFrame, styles: dict[str, dict]) -> None:
    """The speed of the fastest way of either side at a price of up to `NEAR`, beside its mark; of all, if none is."""
    near = panel[panel["x"] <= NEAR]
    sides = [rows if len(rows) else panel[panel["rival"].eq(side)] for side, rows in _by_side(panel, near)]
    fastest = pd.DataFrame([rows.loc[rows["tokens_per_s"].idxmax()] for rows in sides]).sort_values("tokens_per_s")
    for place, row in enumerate(fastest.itertuples()):
        shift = (10, 7 if place == len(fastest) - 1 else -8)
        axes.annotate(
            f"{row.tokens_per_s:.2g}",
            (row.x, row.tokens_per_s),
            shift,
            textcoords="offset points",
            va="center",
            fontsize=10,
            fontweight="bold",
            color=styles[row.way]["color"],
            zorder=4,
            path_effects=[HALO],  # other marks may stand where it is written
        )


def _by_side(panel: pd.DataFrame, near: pd.DataFrame) -> list[tuple[bool, pd.DataFrame]]:
    """The rows of `near` by whether they are of other software, for the sides that a panel has."""
    return [(side, near[near["rival"].eq(side)]) for side in sorted(panel["rival"].unique())]


def on_front(panel: pd.DataFrame) -> np.ndarray:
    """Whether no other way of a limit is as fast and as near to the model, and better in one of both: bool [rows].

    Columns: tokens_per_s and relative. A way without a price is never on the front.
    """
    speed, price = panel["tokens_per_s"].to_numpy(float), panel["relative"].to_numpy(float)
    beaten = [
        np.any((speed >= s) & (price <= p) & ((speed > s) | (price < p))) for s, p in zip(speed, price, strict=True)
    ]
    return ~np.array(beaten) & np.isfinite(price)


def _styles(table: pd.DataFrame) -> dict[str, dict]:
    """Colour and shape of each way."""
    ours, theirs = (list(dict.fromkeys(table["way"][table["rival"].astype(bool).eq(rival)])) for rival in (False, True))
    palette = dict(zip(ours, colours([name.lower() for name in ours]).values(), strict=True))
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.8, "markersize": 10}
    used: list[tuple] = []
    for name, colour in palette.items():
        palette[name] = tuple(1 - (1 - part) * LIGHTER ** used.count(colour) for part in colour)
        used.append(colour)
    styles = {name: {"color": palette[name], "marker": "o"} | edge for name in ours}
    for place, name in enumerate(theirs):  # a shape that is taken comes in another grey
        grey = THEIRS[place // len(SHAPES) % len(THEIRS)]
        styles[name] = {"color": grey, "marker": SHAPES[place % len(SHAPES)]} | edge
    return styles


def _legend(table: pd.DataFrame, styles: dict[str, dict]) -> list[Line2D]:
    handles = [Line2D([], [], linestyle="none", label=name, **style) for name, style in styles.items()]
    if "predicted_per_s" in table and table["predicted_per_s"].notna().any():
        handles.append(Line2D([], [], label="predicted by the plan", **PLANNED))
    return handles


def _axes(panels: np.ndarray, table: pd.DataFrame, edge: float, lost: float | None) -> None:
    """Scales and ticks, the same for all panels."""
    speeds = table["tokens_per_s"].astype(float)
    for axes in panels.flat:
        axes.set(xscale="log", yscale="log", xlim=(0.96, (lost or edge) * 1.05))
        axes.set_ylim(speeds.min() / 1.8, speeds.max() * 1.8)
        label_log_axis(axes.yaxis, 1, 2, 5)
        label_log_axis(axes.xaxis, 1, 1.1, 1.2, 1.5, 2, 3, 5)
        if lost:
            ticks = [tick for tick in (1, 1.1, 1.2, 1.5, 2, 3, 5) if tick <= edge]
            axes.set_xticks([*ticks, lost], [*(f"{tick:g}" for tick in ticks), "not\nknown"])


def _size(limit_mb: float) -> str:
    return f"{limit_mb / 1000:g} GB" if limit_mb >= 1000 else f"{limit_mb:g} MB"
