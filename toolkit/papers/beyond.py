"""What the notebooks beyond the papers share: their variants, tables, figures and sentences."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from toolkit.pruning.pruned import DENSE
from toolkit.studies.forms import CALIBRATED, HALF_BITS, entropy_bits
from toolkit.studies.variants import ModelVariant, pareto_front

TWO_FOUR = "2:4"
FEW_BITS = "fewer bits, no pruning"
FEW_BITS_CALIBRATED = "fewer bits, calibrated"
VALUES = ("fp16", "int8")


def byte_variants(
    methods: Sequence[str], sparsities: Sequence[float], few_bits: Sequence[str], windows: int | None, seed: int
) -> list[ModelVariant]:
    """Dense in 16 bits and in `few_bits`; then each method at each sparsity and at 2:4.

    Every pruned model comes twice: values in 16 bits and values in int8, packed as Endor or as 2:4.
    """
    found = few_bits_variants(few_bits, windows, seed)
    for method in methods:
        calibration = {"method": method, "calibration_windows": windows, "seed": seed}
        for values in VALUES:
            found += [ModelVariant(f"{values}, endor", sparsity=share, **calibration) for share in sparsities]
            found.append(ModelVariant(f"{values}, 2:4", sparsity=0.5, pattern=TWO_FOUR, **calibration))
    return found


def few_bits_variants(forms: Sequence[str], windows: int | None, seed: int) -> list[ModelVariant]:
    """A dense model in 16 bits and in each form (names in `FORMS`, or in `CALIBRATED` with so many windows)."""
    calibration = {"calibration_windows": windows, "seed": seed}
    return [ModelVariant(form, **calibration if form in CALIBRATED else {}) for form in ("fp16", *forms)]


def by_variant(table: pd.DataFrame) -> pd.DataFrame:
    """One row a variant, in order, of the long table that `compare_variants` gives.

    Columns: family (what its points are drawn as), form, method, pattern, zeros, bits_per_weight, ratio, entropy_bits,
    perplexity, accuracy (mean over the tasks), chance (the same mean of guessing), accuracy_error (its standard error,
    tasks taken as independent), on_front (no other variant has both fewer bits and a lower perplexity).
    """
    labels = ["form", "method", "pattern", "zeros", "bits_per_weight", "ratio", "entropy_bits"]
    rows = []
    for key, group in table.groupby(labels, sort=False, dropna=False):
        tasks = group[group["metric"].ne("perplexity")]
        row = dict(zip(labels, key, strict=True))
        row["perplexity"] = group.loc[group["metric"].eq("perplexity"), "value"].item()
        row |= {"accuracy": tasks["value"].mean(), "chance": tasks["chance"].mean()}
        row["accuracy_error"] = np.sqrt((tasks["standard_error"] ** 2).sum()) / len(tasks) if len(tasks) else np.nan
        rows.append({"family": _family(row)} | row)
    found = pd.DataFrame(rows)
    return found.assign(on_front=pareto_front(found["bits_per_weight"], found["perplexity"]))


def draw_quality(axes: Axes, variants: pd.DataFrame, value: str) -> None:
    """A column of `by_variant` over bits a weight: a line a family, the point of each variant named by its zeros."""
    families = list(dict.fromkeys(variants["family"]))
    colours = dict(zip(families, sns.color_palette("colorblind", len(families)), strict=True))
    for family, rows in variants.groupby("family", sort=False):
        line = rows[rows["pattern"].ne(TWO_FOUR)].sort_values("bits_per_weight")
        structured = rows[rows["pattern"].eq(TWO_FOUR)]
        axes.plot(line["bits_per_weight"], line[value], "o-", color=colours[family], markersize=4, label=family)
        axes.plot(structured["bits_per_weight"], structured[value], "*", color=colours[family], markersize=9)
    axes.set_xlabel("bits per weight")
    axes.set_ylabel(value)


def draw_front(axes: Axes, variants: pd.DataFrame) -> None:
    """The Pareto front of perplexity over bits, as steps behind the points, its members named."""
    front = variants[variants["on_front"]].sort_values("bits_per_weight")
    steps = {"where": "post", "color": "black", "linewidth": 6, "alpha": 0.12, "label": "Pareto front"}
    axes.step(front["bits_per_weight"], front["perplexity"], **steps)
    for row in front.itertuples():
        place = (row.bits_per_weight, row.perplexity)
        axes.annotate(name(row), place, xytext=(5, 6), textcoords="offset points", fontsize=7)


def draw_bits(axes: Axes, variants: pd.DataFrame) -> None:
    """Bits a weight over sparsity: packed points beside the bitmap's closed form and the entropy limit, by value."""
    sparsities = np.linspace(0.2, 0.9, 71)
    for colour, (values, bits) in zip(("C0", "C1"), {"fp16": 16, "int8": 8}.items(), strict=True):
        packed = variants[variants["form"].eq(f"{values}, endor")]
        axes.plot(sparsities, 1 + (1 - sparsities) * bits, color=colour, label=f"bitmap + {values} values")
        limit = [entropy_bits(share, bits) for share in sparsities]
        axes.plot(sparsities, limit, color=colour, linestyle="--", label=f"entropy limit, {values}")
        axes.plot(packed["zeros"], packed["bits_per_weight"], "o", color=colour, markersize=4)
    axes.set(xlabel="share of zeros", ylabel="bits per weight")


def name(row) -> str:
    """A variant in a few words: `int4, hqq`, or `wanda 50 % fp16`."""
    if row.method == DENSE:
        return row.form
    return f"{row.method} {row.pattern} {row.form.split(',')[0]}"


def front_sentence(variants: pd.DataFrame) -> str:
    """What the table says of equal bytes: who is on the front, and what stands beside Endor at 50 %."""
    front = variants[variants["on_front"]].sort_values("bits_per_weight", ascending=False)
    members = ", ".join(
        f"{name(row)} ({row.bits_per_weight:.1f} bits, {row.perplexity:.1f})" for row in front.itertuples()
    )
    found = f"on the front of perplexity against bits per weight are {members}."
    return " ".join([found, *beaten_headline(variants).values()])


def beaten_headline(variants: pd.DataFrame) -> dict[str, str]:
    """How many of the models packed as Endor lose to plain fewer bits at no more bytes; empty where there are none."""
    packed = variants[variants["form"].eq("fp16, endor")]
    beaten = [row for row in packed.itertuples() if _smaller_and_better(variants, row)]
    if packed.empty:
        return {}
    return {
        "negative": f"Of {len(packed)} pruned models packed as Endor in fp16, {len(beaten)} are beaten by a model with "
        "fewer bits and no pruning that takes no more bytes."
    }


def _smaller_and_better(variants: pd.DataFrame, row) -> bool:
    quantised = variants[variants["method"].eq(DENSE)]
    better = quantised["perplexity"].lt(row.perplexity) & quantised["bits_per_weight"].le(row.bits_per_weight)
    return bool(better.any())


def _family(row: dict) -> str:
    if row["method"] == DENSE:
        return FEW_BITS_CALIBRATED if row["form"] in CALIBRATED else FEW_BITS
    return f"{row['method']}, {row['form'].split(',')[0]} values"


def draw_rows(axes: Axes, zeros: pd.DataFrame) -> None:
    """How far apart a matrix's rows are in sparsity, by method and layer; the band is over operations."""
    span = zeros.assign(span=zeros["row_highest"] - zeros["row_lowest"])
    sns.lineplot(span, x="layer", y="span", hue="method", style="method", errorbar=("pi", 100), ax=axes)
    axes.set(ylabel="row sparsity, largest − smallest", title="Rows: how unlike they are", ylim=(-0.03, 1))
    axes.legend(title=None, loc="upper right", ncols=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_blocks(axes: Axes, zeros: pd.DataFrame) -> None:
    """The spread of sparsity over blocks of 16 × 16, over what random zeros would have; 1 is random."""
    ratio = zeros.assign(ratio=zeros["spread_16x16"] / zeros["random_16x16"])
    sns.stripplot(ratio, x="op", y="ratio", hue="method", dodge=True, size=3, jitter=0.15, legend=False, ax=axes)
    axes.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.set(xlabel="", ylabel="spread over random zeros'", title="Blocks of 16 × 16 (random: 1)", ylim=(0, None))
    axes.tick_params(axis="x", rotation=20)


def draw_overlaps(axes: Axes, overlaps: pd.DataFrame) -> None:
    """The Jaccard overlap of each pair of methods, by layer; the band is over operations, dotted is chance."""
    pairs = overlaps.assign(pair=overlaps["first"] + " and " + overlaps["second"])
    sns.lineplot(pairs, x="layer", y="jaccard", hue="pair", style="pair", errorbar=("pi", 100), ax=axes)
    axes.axhline(overlaps["chance"].mean(), color="gray", linewidth=0.8, linestyle=":")
    axes.set(ylabel="zeros in common (Jaccard)", title="Two methods' zeros (dotted: chance)", ylim=(0, 1))
    axes.legend(title=None, loc="lower right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_formats(axes: Axes, sizes: pd.DataFrame) -> None:
    """Bits a weight of each format, by method: the mean over all linears."""
    sns.barplot(sizes, x="format", y="bits_per_weight", hue="method", errorbar=("pi", 100), ax=axes, legend=False)
    axes.axhline(HALF_BITS, color="gray", linewidth=0.8, linestyle=":")
    axes.set(xlabel="", ylabel="bits per weight (range over linears)", title="Bytes at these masks (dotted: dense)")


def zeros_table(zeros: pd.DataFrame, overlaps: pd.DataFrame, sizes: pd.DataFrame) -> pd.DataFrame:
    """The three tables of `beyond/where_zeros_fall` under each other; `part` says which a row is of."""
    parts = {"zeros": zeros.assign(evidence="measured"), "overlaps": overlaps.assign(evidence="measured")}
    parts["sizes"] = sizes
    return pd.concat([table.assign(part=part) for part, table in parts.items()], ignore_index=True)


def zeros_sentence(zeros: pd.DataFrame, overlaps: pd.DataFrame, sizes: pd.DataFrame) -> str:
    """What the tables of `beyond/where_zeros_fall` say, in one paragraph."""
    spans = (zeros["row_highest"] - zeros["row_lowest"]).groupby(zeros["method"], sort=False).mean()
    common = overlaps.groupby(["first", "second"], sort=False)[["jaccard", "chance"]].mean()
    bits = sizes.pivot_table(index="format", columns="method", values="bits_per_weight", sort=False)
    two_four = zeros.groupby("method", sort=False)["lost_to_two_four"].mean()
    return (
        "the sparsest and the densest row of a matrix differ in sparsity by "
        + ", ".join(f"{span:.2f} ({method})" for method, span in spans.items())
        + " on average. Zeros in common (Jaccard): "
        + ", ".join(f"{one} and {other} {row.jaccard:.2f}" for (one, other), row in common.iterrows())
        + f"; chance is {common['chance'].mean():.2f}. The bitmap takes "
        + ", ".join(f"{bits.loc['endor', method]:.2f} ({method})" for method in bits)
        + " bits a weight, ELL "
        + ", ".join(f"{bits.loc['ell', method]:.1f}" for method in bits)
        + ". 2:4 would drop "
        + ", ".join(f"{lost:.0%} ({method})" for method, lost in two_four.items())
        + " of the non-zeros."
    )


def pruning_sentence(table: pd.DataFrame, differences: pd.DataFrame) -> str:
    """What `endor/tab_perplexity` shows: perplexity beside bits, and whether the paired difference is real."""
    lost = table[table["metric"].eq("perplexity")]
    said = lambda row: f"{row.method} {row.value:.1f} ({row.bits_per_weight:.1f} bits)"  # noqa: E731
    parts = []
    for pattern, rows in lost.groupby("pattern", sort=False):
        where = "not pruned" if pattern == "none" else f"at {pattern}"
        parts.append(f"{where}, {', '.join(map(said, rows.itertuples()))}")
    clear = int((differences["value"].abs() > 2 * differences["standard_error"]).sum())
    return (
        f"{'; '.join(parts)}. Paired by window, the difference of log-perplexity {differences['method'].iloc[0]} "
        f"is {differences['value'].min():+.3f} to {differences['value'].max():+.3f} (draws of calibration text: "
        f"{len(differences)}, of which beyond two standard errors: {clear})."
    )
