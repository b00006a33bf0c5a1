"""The pictures of SpQR's mat-vecs: how many times as fast, and how near to what bytes and instructions allow."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from toolkit.evidence.figures import HATCHES, PUBLISHED, first_on_top, mark_published
from toolkit.papers.spqr_kernels import CSR, DENSE, MEAN, MINE, OURS, PTCSR, QUICKER

NAMES = {
    DENSE: "torch, dense bf16",
    OURS: "ours, dense bf16",
    "int8": "int8, 8 bits",
    "endor": "Endor, half zeros, 9 bits",
    CSR: "SpQR, CSR",
    PTCSR: "SpQR, PTCSR",
    QUICKER: "SpQR, the quicker",
    "avx2": "neither, AVX2",
    "avx2_table": "table, AVX2",
    "avx2_arithmetic": "arithmetic, AVX2",
    "table": "table, any CPU",
    "arithmetic": "arithmetic, any CPU",
}
ORDER = list(NAMES)
SHOWN = (DENSE, OURS, "int8", "endor", CSR, PTCSR)
CONVERSIONS = (("avx2", "avx2_table", "avx2_arithmetic"), ("table", "arithmetic"))  # panels of figure 3.2
MILLISECONDS = {"ms": "seconds", "ms_low": "low_s", "ms_high": "high_s"}
PTCSR_WINS = ("up_proj", "gate_proj", "down_proj")  # in the thesis, on an RTX 4060
LIMIT = {"color": "black", "linewidth": 1.6}


def speedup_figure(table: pd.DataFrame, limits: pd.DataFrame, comparison: pd.DataFrame) -> Figure:
    """Speed-ups over dense with their byte limits, SpQR's times over their limits, and published ratios beside ours."""
    figure = plt.figure(figsize=(11, 7.6), layout="constrained")
    places = figure.subplot_mosaic([["speedups", "speedups"], ["limits", "published"]], height_ratios=[4, 3.4])
    mine = table[table["profile"] == MINE]
    draw_bars(places["speedups"], mine, "speedup", [name for name in SHOWN if name in set(mine["contestant"])])
    places["speedups"].set(ylabel="times as fast as torch's bf16", title="This machine, measured (line: byte limit)")
    draw_limits(places["limits"], mine, limits)
    draw_published(places["published"], comparison)
    return figure


def conversion_figure(table: pd.DataFrame) -> Figure:
    """Milliseconds of a mat-vec with a table and with conversion: a panel for AVX2, one for plain loops."""
    shown = table[table["op"] != MEAN]
    shown = shown.assign(**{name: 1e3 * shown[of] for name, of in MILLISECONDS.items()})
    panels = [[name for name in names if name in set(shown["contestant"])] for names in CONVERSIONS]
    panels = [names for names in panels if names]
    figure, places = plt.subplots(1, len(panels), figsize=(11, 4), layout="constrained", squeeze=False)
    for axes, names in zip(places.flat, panels, strict=True):
        draw_bars(axes, shown, "ms", names, limit=None)
        axes.set(ylabel="ms", title=", ".join(dict.fromkeys(NAMES[name].rpartition(", ")[2] for name in names)))
    return figure


def storages_figure(table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:
    """Both storages over dense, then over each other with the winners of the thesis, then the published ratios."""
    figure = plt.figure(figsize=(11, 7.6), layout="constrained")
    places = figure.subplot_mosaic([["speedups", "speedups"], ["storages", "published"]], height_ratios=[3.4, 3.6])
    mine = table[table["profile"] == MINE]
    draw_bars(places["speedups"], mine, "speedup", [CSR, PTCSR])
    places["speedups"].set(ylabel="times as fast as torch's bf16", title="This machine, measured (line: byte limit)")
    draw_storages(places["storages"], table)
    draw_published(places["published"], comparison)
    return figure


def draw_storages(axes: Axes, table: pd.DataFrame) -> None:
    """CSR's speed over PTCSR's, by operation and machine; behind the operation the winner of the thesis."""
    ops = [op for op in dict.fromkeys(table["op"]) if op != MEAN]
    rows = table[table["contestant"].eq(CSR) & table["op"].isin(ops)]
    for number, (name, found) in enumerate(rows.groupby("profile", sort=False)):
        found, places = found.set_index("op").loc[ops], np.arange(len(ops)) + 0.12 * (number - 0.5)
        label = f"{name}, {found['evidence'].iloc[0]}"
        axes.plot(found["over_other"], places, "o" if name == MINE else "s", color=f"C{number}", label=label)
        if "over_other_low" in found:
            axes.hlines(places, found["over_other_low"], found["over_other_high"], color=f"C{number}", linewidth=1.2)
    axes.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.set_yticks(
        range(len(ops)), [f"{op.removesuffix('_proj')} ({'PTCSR' if op in PTCSR_WINS else 'CSR'})" for op in ops]
    )
    axes.set(xlabel="speed of CSR over PTCSR (above 1: CSR wins)", title="CSR against PTCSR")
    axes.set_ylim(len(ops) - 0.5, -0.6)
    axes.grid(axis="x")
    axes.legend(fontsize=8, loc="lower right")


def draw_bars(
    axes: Axes, table: pd.DataFrame, column: str, contestants: Sequence[str], limit: str | None = "byte_limit"
) -> None:
    """A group of bars an operation, a bar a contestant, a whisker for the quartiles, a line at the column `limit`."""
    ops = list(dict.fromkeys(table["op"]))
    width, colours = 0.84 / len(contestants), dict(zip(ORDER, sns.color_palette("colorblind", len(ORDER)), strict=True))
    for number, contestant in enumerate(contestants):
        rows = table[table["contestant"] == contestant].set_index("op").reindex(ops)
        places = np.arange(len(ops)) + width * (number - (len(contestants) - 1) / 2)
        axes.bar(places, rows[column], 0.92 * width, color=colours[contestant], label=NAMES[contestant])
        axes.vlines(places, rows[f"{column}_low"], rows[f"{column}_high"], color="black", linewidth=1)
        if limit and contestant != DENSE:
            axes.hlines(rows[limit], places - 0.46 * width, places + 0.46 * width, **LIMIT)
    axes.set_xticks(range(len(ops)), ops)
    if limit:
        axes.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=len(contestants), fontsize=8)


def draw_limits(axes: Axes, mine: pd.DataFrame, limits: pd.DataFrame) -> None:
    """SpQR's measured milliseconds, and what bytes and instructions allow."""
    ops, colours = list(dict.fromkeys(limits["op"])), {"bytes_s": "C2", "instructions_s": "C3"}
    for number, contestant in enumerate((CSR, PTCSR)):
        places = np.arange(len(ops)) + 0.4 * (number - 0.5)
        rows = mine[mine["contestant"] == contestant].set_index("op").loc[ops]
        axes.bar(places, 1e3 * rows["seconds"], 0.36, color="0.75" if number else "0.6", label=NAMES[contestant])
        of_storage = limits[limits["contestant"] == contestant].set_index("op").loc[ops]
        for limit, colour in colours.items():
            axes.hlines(1e3 * of_storage[limit], places - 0.19, places + 0.19, color=colour, linewidth=2.2)
    axes.set_xticks(range(len(ops)), [op.removesuffix("_proj") for op in ops])
    axes.set(ylabel="ms", title="SpQR's time over its two limits")
    names = {"bytes_s": "bytes at the read rate", "instructions_s": "instructions, from cache"}
    keys = [Line2D([], [], color=colour, linewidth=2.2, label=names[limit]) for limit, colour in colours.items()]
    keys += axes.get_legend_handles_labels()[0]
    axes.legend(handles=keys, fontsize=8, loc="upper left")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])


def draw_published(axes: Axes, comparison: pd.DataFrame) -> None:
    """Published speed-ups as diamonds, ours as bars: modelled for the machine of the thesis, measured here."""
    claims = [claim for claim in dict.fromkeys(comparison["claim"]) if comparison_unit(comparison, claim)]
    for place, claim in enumerate(claims):
        rows = comparison[(comparison["claim"] == claim) & comparison["ours"].notna()]
        for row in rows.to_dict("records"):
            offset = 0.2 if row["profile"] == MINE else -0.2
            colour = "C0" if row["profile"] == MINE else "0.65"
            style = {"color": colour, "hatch": HATCHES.get(row["evidence"], ""), "edgecolor": "white"}
            axes.barh(place + offset, row["ours"], 0.36, **style)
        mark_published(axes, [comparison.loc[comparison["claim"] == claim, "published"].iloc[0]], [place])
    axes.set_yticks(range(len(claims)), [claim.split("-", 1)[1] for claim in claims])
    axes.set_ylim(-0.6, len(claims) - 0.4)
    first_on_top(axes)
    axes.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    machine = next(name for name in comparison["profile"] if name != MINE)
    keys = [
        Patch(facecolor="0.65", hatch=HATCHES["modelled"], edgecolor="white", label=f"{machine}, modelled"),
        Patch(facecolor="C0", label="this machine, measured"),
        Line2D([], [], label="published", **PUBLISHED),
    ]
    axes.legend(handles=keys, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    axes.set(title="Beside the published ratios")


def comparison_unit(comparison: pd.DataFrame, claim: str) -> bool:
    """Whether a claim is a speed-up over dense that is drawn: the thesis' numbers, not its words."""
    rows = comparison[comparison["claim"] == claim]
    return bool(rows["quantity"].str.startswith("speed-up over dense").all() and rows["ours"].notna().any())
