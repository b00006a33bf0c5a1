"""What `spqr/tab_perplexity` shows: quantisers of few bits side by side, by bits per weight and perplexity."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from toolkit.papers import beyond
from toolkit.studies.variants import paired_differences

DENSE_FORM = "fp16"
SPQR, RIVALS = "int3, spqr 1 %", ("int3, rtn", "int3, hqq", "int3, gptq")
GOAL = 1.15  # perplexity over the dense model's


def by_form(table: pd.DataFrame, windows: pd.DataFrame) -> pd.DataFrame:
    """One row a form, in order, of the tables of `compare_variants` for one model.

    Columns: form, quantiser, bits_per_weight, perplexity, over_dense (ratio of perplexities), log_difference (from
    dense, nats a token, the mean over windows), difference_error (its standard error), on_front.
    """
    found = beyond.by_variant(table)[["form", "bits_per_weight", "perplexity", "on_front"]]
    dense = found.loc[found["form"].eq(DENSE_FORM), "perplexity"].item()
    found.insert(1, "quantiser", found["form"].map(_quantiser))
    found["over_dense"] = found["perplexity"] / dense
    pairs = {form: _difference(windows, form, DENSE_FORM) for form in found["form"] if form != DENSE_FORM}
    none = (0.0, 0.0)
    found["log_difference"] = [pairs.get(form, none)[0] for form in found["form"]]
    found["difference_error"] = [pairs.get(form, none)[1] for form in found["form"]]
    return found


def between(windows: pd.DataFrame, first: str, others: Sequence[str]) -> pd.DataFrame:
    """Differences of log-perplexity, window by window, of one form from each of others. Columns: form, value, error."""
    rows = [(f"{first} − {other}", *_difference(windows, first, other)) for other in others]
    return pd.DataFrame(rows, columns=["form", "value", "standard_error"])


def draw(axes: Axes, found: pd.DataFrame) -> None:
    """Perplexity over bits a weight of each form, and the Pareto front with its members' names."""
    beyond.draw_front(axes, found.assign(method=beyond.DENSE))
    style = {"hue": "quantiser", "style": "quantiser", "s": 45, "palette": "colorblind"}
    sns.scatterplot(
        found[found["form"].ne(DENSE_FORM)], x="bits_per_weight", y="perplexity", ax=axes, zorder=3, **style
    )
    dense = found.loc[found["form"].eq(DENSE_FORM), "perplexity"].item()
    axes.axhline(dense, color="black", linewidth=1, linestyle="--", label="dense")
    axes.axhline(GOAL * dense, color="gray", linewidth=1, linestyle=":", label=f"{GOAL} × dense")
    axes.set(yscale="log", xlabel="bits per weight", xlim=(2, 10))


def sentence(found: pd.DataFrame) -> str:
    """What the table says of SpQR, its rivals and the goal."""
    rows = found.set_index("form")
    told = [f"{form} {_told(rows.loc[form])}" for form in (SPQR, *RIVALS) if form in rows.index]
    smaller = found[found["over_dense"].le(GOAL)].sort_values("bits_per_weight")
    best = smaller.iloc[0]
    return (
        f"perplexity over dense: {'; '.join(told)}. The fewest bits that stay within {GOAL} × dense are "
        f"{best['bits_per_weight']:.2f} ({best['form']})."
    )


def _told(row: pd.Series) -> str:
    return f"{row['over_dense']:.3f} at {row['bits_per_weight']:.2f} bits"


def _quantiser(form: str) -> str:
    """`int3, gptq 16` is GPTQ's with another group, `Q3_K_M, llama.cpp` llama.cpp's."""
    return "dense" if form == DENSE_FORM else form.split(", ")[-1].split()[0]


def _difference(windows: pd.DataFrame, first: str, second: str) -> tuple[float, float]:
    same = windows.assign(calibration_windows=np.nan, seed=0)  # forms without calibration have no draw
    found = paired_differences(same, "form", first, second)
    return found["value"].item(), found["standard_error"].item()
