"""Parts that the figures of SpQR's mat-vecs share: names, bars with limits, and the published ratios."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from toolkit.evidence.figures import HATCHES, PUBLISHED, claim_labels, first_on_top, mark_published
from toolkit.measure.disturbance import starred
from toolkit.papers.spqr.speedups import CSR, DENSE, MINE, OURS, PTCSR, QUICKER

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
SAME = {"table": "avx2_table", "arithmetic": "avx2_arithmetic"}  # one way to multiply has one colour on every CPU
ORDER = [name for name in NAMES if name not in SAME]
LIMIT = {"color": "black", "linewidth": 1.6}


def draw_bars(
    axes: Axes, table: pd.DataFrame, column: str, contestants: Sequence[str], limit: str | None = "byte_limit"
) -> None:
    """A group of bars an operation, a bar a contestant, a whisker for its range, a line at the column `limit`."""
    ops = list(dict.fromkeys(table["op"]))
    width, colours = 0.84 / len(contestants), dict(zip(ORDER, sns.color_palette("colorblind", len(ORDER)), strict=True))
    for number, contestant in enumerate(contestants):
        rows = table[table["contestant"] == contestant].set_index("op").reindex(ops)
        places = np.arange(len(ops)) + width * (number - (len(contestants) - 1) / 2)
        axes.bar(
            places, rows[column], 0.92 * width, color=colours[SAME.get(contestant, contestant)], label=NAMES[contestant]
        )
        axes.vlines(places, rows[f"{column}_low"], rows[f"{column}_high"], color="black", linewidth=1)
        if limit and contestant != DENSE:
            axes.hlines(rows[limit], places - 0.46 * width, places + 0.46 * width, **LIMIT)
    axes.set_xticks(range(len(ops)), starred(table, "op").drop_duplicates())
    if limit:
        axes.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=len(contestants), fontsize=8)


def draw_published(axes: Axes, comparison: pd.DataFrame) -> None:
    """Published speed-ups as diamonds, ours as bars: modelled for the machine of the thesis, measured here."""
    claims = [claim for claim in dict.fromkeys(comparison["claim"]) if _is_drawn(comparison, claim)]
    for place, claim in enumerate(claims):
        rows = comparison[(comparison["claim"] == claim) & comparison["ours"].notna()]
        for row in rows.to_dict("records"):
            offset = 0.2 if row["profile"] == MINE else -0.2
            colour = "C0" if row["profile"] == MINE else "0.65"
            style = {"color": colour, "hatch": HATCHES.get(row["evidence"], ""), "edgecolor": "white"}
            axes.barh(place + offset, row["ours"], 0.36, **style)
        mark_published(axes, [comparison.loc[comparison["claim"] == claim, "published"].iloc[0]], [place])
    first = comparison.drop_duplicates("claim").set_index("claim").loc[claims]
    axes.set_yticks(range(len(claims)), claim_labels(first, width=24), fontsize=7.5)
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


def _is_drawn(comparison: pd.DataFrame, claim: str) -> bool:
    """Whether a claim is a speed-up over dense that is drawn: the thesis' numbers, not its words."""
    rows = comparison[comparison["claim"] == claim]
    return bool(rows["quantity"].str.startswith("speed-up over dense").all() and rows["ours"].notna().any())
