"""LLM in a flash: figures and sentences about predictors, from the tables of `flash_predictors`."""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

GOAL = 0.03  # of perplexity, above the thresholded model's
COLOURS = {"none": "black", "low_rank": "C0", "gate": "C1", "few_bits": "C2"}
NAMES = {"none": "thresholds alone", "low_rank": "low rank", "gate": "gate", "few_bits": "4-bit copy"}


def outputs_figure(outputs: pd.DataFrame, layers: pd.DataFrame) -> Figure:
    """(a) Outputs of one layer's neurons by whether they were predicted; (b) misses and false alarms by layer."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained")
    active = outputs["magnitude"] > 1
    parts = {
        ("active, predicted", "C2"): outputs["predicted"] & active,
        ("active, missed", "C3"): ~outputs["predicted"] & active,
        ("not active, predicted", "C1"): outputs["predicted"] & ~active,
        ("not active, not predicted", "C7"): ~outputs["predicted"] & ~active,
    }
    for (name, colour), chosen in parts.items():
        rows = outputs[chosen]
        left.plot(rows["magnitude"], rows["share"], color=colour, drawstyle="steps-mid", label=name)
    left.axvline(1, color="black", linewidth=0.8, linestyle=":")
    title = f"(a) layer {outputs['layer'].iloc[0]}, {outputs['label'].iloc[0]}"
    left.set(
        xscale="log", xlabel="output of a neuron over the threshold", ylabel="share of neurons and tokens", title=title
    )
    left.yaxis.set_major_formatter(PercentFormatter(1, 1))
    left.legend()
    for label, rows in layers.groupby("label", sort=False):
        colour = COLOURS[rows["kind"].iloc[0]]
        style = "-" if rows["label"].iloc[0] == outputs["label"].iloc[0] or rows["kind"].iloc[0] != "low_rank" else ":"
        right.plot(rows["layer"], rows["false_negatives"], style, color=colour, label=label)
        right.plot(rows["layer"], rows["false_positives"], style, color=colour, alpha=0.35, label="_nolegend_")
    _percent(right, "false negatives (pale: false positives)")
    right.set_title("(b) errors by layer")
    right.legend(fontsize=8)
    return figure


def fired_figure(layers: pd.DataFrame, rows_held: pd.DataFrame) -> Figure:
    """(a) Share of neurons that fire and are predicted, by layer; (b) rows in memory over time, of some layers."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained")
    first = layers[layers["label"] == layers["label"].iloc[0]]
    left.fill_between(first["layer"], first["active"], color="black", alpha=0.15, label="fired")
    for label, rows in layers.groupby("label", sort=False):
        left.plot(rows["layer"], rows["predicted"], color=COLOURS[rows["kind"].iloc[0]], label=label)
    _percent(left, "share of the layer's neurons")
    left.set_title("(a) fired and predicted")
    left.legend(fontsize=8)
    chosen = sorted({0, rows_held["layer"].max() // 2, rows_held["layer"].max()})
    for number, layer in enumerate(chosen):
        rows = rows_held[rows_held["layer"] == layer]
        right.plot(rows["token"], rows["held"], color=f"C{number}", linewidth=1, label=f"layer {layer}")
    right.set(xlabel="token", ylim=(0, 1), title=f"(b) in memory, {rows_held['label'].iloc[0]}")
    right.yaxis.set_major_formatter(PercentFormatter(1, 0))
    right.legend()
    return figure


def cost_figure(table: pd.DataFrame) -> Figure:
    """What predictors cost in perplexity: over the share of neurons predicted, and over the bytes of the FFNs."""
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained", sharey=True)
    bytes_ = table["resident_share"] + table["read_share"]
    for axes, x in zip(panels, (table["predicted"], bytes_), strict=True):
        for (kind, cut), rows in table.assign(x=x).groupby(["kind", "cut"], sort=False):
            rows, style = rows.sort_values("x"), "o-" if cut else "o--"
            label = NAMES[kind] + ("" if cut else ", all used")
            axes.plot(rows["x"], rows["over_thresholds"], style, color=COLOURS[kind], label=label, markersize=4)
        axes.axhline(GOAL, color="gray", linewidth=0.8, linestyle="--")
        axes.set_yscale("symlog", linthresh=0.01)
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.yaxis.set_major_formatter(PercentFormatter(1, None))
    panels[0].set(xlabel="neurons predicted", ylabel="perplexity above thresholds alone", title="(a) over predictions")
    panels[1].set(xlabel="FFN bytes: resident + read a token", title="(b) over bytes")
    panels[0].legend()
    return figure


def predictor_sentence(table: pd.DataFrame) -> str:
    """How many neurons fire, and what each variant predicts, misses and costs."""
    words = [
        f"{row.label}: predicts {row.predicted:.0%} of the neurons, misses {row.false_negatives:.0%} of the active "
        f"ones and takes {row.resident_share:.0%} of the FFNs' bytes; perplexity {row.over_thresholds:+.1%}"
        for row in table[table["kind"] != "none"].itertuples()
    ]
    fired, model = table["active"].mean(), table["model"].iloc[0]
    return f"{fired:.0%} of the neurons of {model} fire. {'. '.join(words)}."


def cheapest_sentence(table: pd.DataFrame) -> str:
    """Which variants meet the goal for perplexity with the fewest bytes, with thresholds in place and without."""
    return " ".join(
        _cheapest(rows, bool(cut)) for cut, rows in table[table["kind"] != "none"].groupby("cut", sort=False)
    )


def _cheapest(rows: pd.DataFrame, cut: bool) -> str:
    what = "Where only active neurons count" if cut else "Where all that is loaded counts"
    met = rows[rows["over_thresholds"] <= GOAL]
    if met.empty:
        best = rows.loc[rows["over_thresholds"].idxmin()]
        lost = f"{best['label']} with {best['over_thresholds']:+.1%}"
        return f"{what}, no predictor stays within {GOAL:.0%} of the thresholds' perplexity; the nearest is {lost}."
    best = met.loc[(met["resident_share"] + met["read_share"]).idxmin()]
    return (
        f"{what}, the cheapest within {GOAL:.0%} of the thresholds' perplexity is {best['label']}: it predicts "
        f"{best['predicted']:.0%} of the neurons, keeps {best['resident_share']:.0%} of the FFNs' bytes in memory and "
        f"costs {best['over_thresholds']:+.1%}."
    )


def _percent(axes: Axes, label: str) -> None:
    axes.set(xlabel="layer", ylabel=label, ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))


def fired_sentence(layers: pd.DataFrame, rows_held: pd.DataFrame, window: int) -> str:
    """How many neurons fire, how many times as many are predicted, and how many are held."""
    alone = layers[layers["kind"] == "none"]
    told = layers[layers["kind"] != "none"]
    ratios = told.groupby("label", sort=False)["predicted"].mean() / alone["active"].mean()
    ends = rows_held.groupby("layer")["held"].mean()
    words = ", ".join(f"{label} {ratio:.1f} times" for label, ratio in ratios.items())
    return (
        f"{alone['active'].mean():.0%} of the neurons fire (by layer {alone['active'].min():.0%} to "
        f"{alone['active'].max():.0%}). Predicted are, as multiples of that: {words}. A window of {window} tokens "
        f"holds {rows_held['held'].mean():.0%} of a layer on average, {ends.min():.0%} to {ends.max():.0%} by layer, "
        f"and a token brings {rows_held['loaded'].mean():.0%}."
    )


def criteria_sentence(criteria: pd.DataFrame) -> str:
    """Perplexity dense, and with thresholds by each criterion."""
    told = criteria.set_index("label")["perplexity"]
    return (
        f"Perplexity is {told['dense']:.1f} dense, {told['output']:.1f} with thresholds on the outputs and "
        f"{told['gate']:.1f} with as many zeros by thresholds on the gates."
    )
