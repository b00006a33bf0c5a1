"""One look for all figures: colours that a colour-blind reader tells apart, text readable at a paper's column width."""

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes

COLUMN_IN = 6.4  # inches; printed at a column's 3.3 the text is still 5 pt
GOLDEN = 0.62
PUBLISHED = {"marker": "D", "color": "black", "zorder": 5, "linestyle": "none", "markersize": 5}


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
            "figure.constrained_layout.use": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.color": "#e4e7ec",
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 10,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "svg.hashsalt": "toolkit",
            "svg.fonttype": "none",
        },
    )
    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=sns.color_palette("colorblind"))


def mark_published(axes: Axes, x, y, label: str = "published") -> None:
    """Black diamonds for the paper's own numbers, the same mark in every figure."""
    axes.plot(x, y, label=label, **PUBLISHED)
