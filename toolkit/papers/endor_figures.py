"""Tables and figures of single ENDOR notebooks."""

from collections.abc import Iterable

import pandas as pd
import seaborn as sns

from toolkit.evidence.figures import mark_published
from toolkit.machines.machine import Profile

TIERS = {"storage": "disk", "dram": "DRAM", "device": "GPU memory"}
LINKS = {
    "storage_to_dram_gb_s": "disk to DRAM",
    "dram_to_device_gb_s": "DRAM to GPU",
    "storage_to_device_gb_s": "disk to GPU",
}


def tier_table(machines: Iterable[Profile]) -> pd.DataFrame:
    """Capacities and bandwidths of the tiers of machines, and of the links between them, named in `tier` (figure 1)."""
    numbers = pd.concat((machine.table() for machine in machines), ignore_index=True)
    tier = numbers["part"].map(TIERS).fillna(numbers["quantity"].map(LINKS))
    kept = numbers["quantity"].isin(["capacity_bytes", "bandwidth_gb_s", *LINKS]) & tier.notna()
    return numbers.assign(tier=tier)[kept]


def size_curves(sizes: pd.DataFrame, comparison: pd.DataFrame) -> sns.FacetGrid:
    """Bytes over dense bytes by sparsity, a panel for each data type, with the published ratios at 50 % (figure 4)."""
    named = {"x": "sparsity", "y": "ratio", "hue": "format", "style": "format", "col": "dtype"}
    grid = sns.relplot(sizes, **named, kind="line", markers=True, height=3.1, aspect=1.05)
    grid.set(xlabel="sparsity (share of zeros)", ylabel="bytes / dense bytes", ylim=(0, 1.6))
    grid.set_titles("{col_name}")
    ratios = comparison[comparison["unit"].eq("ratio")]
    for dtype, axes in grid.axes_dict.items():
        axes.axhline(1, color="gray", linewidth=0.8, linestyle=":")
        shown = ratios[ratios["claim"].str.contains(dtype.replace("float", "fp"))]
        mark_published(axes, [0.5] * len(shown), shown["published"], "published")
    first = grid.axes.flat[0]
    first.legend(handles=first.lines[-1:], loc="upper right")
    return grid
