"""LLM in a flash: figures and sentences about predictors, from the tables of `toolkit.studies.predictors`."""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

GOAL = 0.03  # of perplexity, above the thresholded model's
COLOURS = {"none": "black", "low_rank": "C0", "gate": "C1", "few_bits": "C2"}
NAMES = {"none": "thresholds alone", "low_rank": "low rank", "gate": "gate", "few_bits": "4-bit copy"}
COLOURS |= {"copy_last": "C4", "nothing": "C7"}
NAMES |= {"copy_last": "copy of the last token", "nothing": "no neuron"}


def outputs_figure(outputs: pd.DataFrame, layers: pd.DataFrame) -> Figure:
    """(a) Outputs of one layer's neurons by whether they were predicted; (b), (c) misses and false alarms by layer."""
    figure, (sizes, *errors) = plt.subplots(1, 3, figsize=(10.5, 4.2), layout="constrained", width_ratios=(1.3, 1, 1))
    active, found = outputs["magnitude"] > 1, outputs["predicted"]
    parts = {
        "active, predicted": (active & found, "C2"),
        "active, missed": (active & ~found, "C3"),
        "not active, predicted": (~active & found, "C1"),
        "not active, not predicted": (~active & ~found, "C7"),
    }
    for name, (chosen, colour) in parts.items():
        rows = outputs[chosen]
        sizes.plot(rows["magnitude"], rows["share"], color=colour, drawstyle="steps-mid", label=name)
    sizes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    sizes.set(xscale="log", xlabel="output over the threshold", ylabel="share of neurons and tokens", ylim=(0, None))
    sizes.set_title(f"(a) layer {outputs['layer'].iloc[0]}, {outputs['label'].iloc[0]}")
    sizes.yaxis.set_major_formatter(PercentFormatter(1, 1))
    for axes, column, title in zip(errors, ("negatives", "positives"), ("(b) missed", "(c) false alarms"), strict=True):
        for label, rows in layers.groupby("label", sort=False):
            style = "--" if rows["kind"].iloc[0] == "low_rank" and label != outputs["label"].iloc[0] else "-"
            colour = COLOURS[rows["kind"].iloc[0]]
            axes.plot(rows["layer"], rows[f"false_{column}"], style, color=colour, label=label)
        _percent(axes, "of the active" if column == "negatives" else "of those not active")
        axes.set_title(title)
    figure.legend(*sizes.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    figure.legend(*errors[0].get_legend_handles_labels(), loc="outside lower right", ncols=2)
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
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    chosen = sorted({0, rows_held["layer"].max() // 2, rows_held["layer"].max()})
    for number, layer in enumerate(chosen):
        rows = rows_held[rows_held["layer"] == layer]
        right.plot(rows["token"], rows["held"], color=f"C{number}", linewidth=1, label=f"layer {layer}")
    right.set(xlabel="token", ylim=(0, 1), title=f"(b) in memory, {rows_held['label'].iloc[0]}")
    right.yaxis.set_major_formatter(PercentFormatter(1, 0))
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    return figure


def cost_figure(table: pd.DataFrame, dense: float) -> Figure:
    """Perplexity with predictors, over the share of neurons predicted and over the bytes of the FFNs."""
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 4.4), layout="constrained", sharey=True)
    alone, told = table[table["kind"] == "none"].iloc[0], table[~table["kind"].isin(["none", "copy_last", "nothing"])]
    bytes_ = told["resident_share"] + told["read_share"]
    for axes, x in zip(panels, (told["predicted"], bytes_), strict=True):
        for (kind, cut), rows in told.assign(x=x).groupby(["kind", "cut"], sort=False):
            rows, style = rows.sort_values("x"), "o-" if cut else "o--"
            label = NAMES[kind] + ("" if cut else ", all used")
            look = {"color": COLOURS[kind], "label": label, "markersize": 4, "fillstyle": "full" if cut else "none"}
            axes.plot(rows["x"], rows["perplexity"], style, **look)
        axes.axhline(alone["perplexity"], color="black", linewidth=0.9, label="thresholds alone")
        axes.axhline((1 + GOAL) * alone["perplexity"], color="black", linewidth=0.9, linestyle="--", label="3 % above")
        axes.axhline(dense, color="gray", linewidth=0.9, linestyle=":", label="dense")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 7)))
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
    panels[0].set(xlabel="neurons predicted", ylabel="perplexity (log)", title="(a) over predictions")
    panels[1].set(xlabel="FFN bytes: resident + read a token", title="(b) over bytes")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
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


def accuracy_figure(accuracy: pd.DataFrame, table: pd.DataFrame) -> Figure:
    """Accuracy on each task with its standard error, a row a variant, and what each variant predicts."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.2, 3.6), layout="constrained", sharey=True, width_ratios=(3, 1)
    )
    labels = list(dict.fromkeys(accuracy["label"]))
    places = {label: place for place, label in enumerate(labels)}
    for number, (task, rows) in enumerate(accuracy.groupby("task", sort=False)):
        y = rows["label"].map(places) + 0.15 * number - 0.15
        left.errorbar(100 * rows["value"], y, xerr=100 * rows["standard_error"], fmt="o", markersize=4, label=task)
        left.axvline(100 * rows["chance"].iloc[0], color=f"C{number}", linewidth=0.7, linestyle=":")
    told = table[table["label"].isin(places)]
    right.barh(told["label"].map(places), 100 * told["predicted"], color="C7", height=0.6)
    left.set_yticks(range(len(labels)), labels)
    left.invert_yaxis()
    left.set(xlabel="% right (dotted: by chance)", title="(a) accuracy")
    right.set(xlabel="% of the neurons", title="(b) predicted", xlim=(0, 100))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure


def accuracy_sentence(accuracy: pd.DataFrame, table: pd.DataFrame) -> str:
    """Mean accuracy of each variant, what it predicts, and whether the fall is more than chance."""
    means = accuracy.groupby("label", sort=False)["value"].mean()
    errors = accuracy.groupby("label", sort=False)["standard_error"].apply(lambda one: (one**2).sum() ** 0.5 / len(one))
    alone = table.loc[table["kind"] == "none", "label"].iloc[0]
    shares = table.set_index("label")["predicted"]
    words, fallen = [], []
    for label in means.index:
        share = f" ({shares[label]:.0%} predicted)" if label in shares and label != alone else ""
        words.append(f"{'thresholds alone' if label == alone else label} {means[label]:.1%}{share}")
        if means[alone] - means[label] > 2 * (errors[alone] ** 2 + errors[label] ** 2) ** 0.5:
            fallen.append(label)
    told = (
        f"clearly below thresholds alone: {', '.join(fallen)}" if fallen else "none is clearly below thresholds alone"
    )
    return f"Mean accuracy on the local tasks: {', '.join(words)}. By two standard errors {told}."


def rank_figure(results: pd.DataFrame) -> Figure:
    """Accuracy and perplexity over the rank of the last layers' predictors."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6), layout="constrained")
    ranked = results[results["kind"] == "low_rank"]
    for number, (task, rows) in enumerate(ranked.groupby("task", sort=False)):
        style = {"color": f"C{number}", "label": task, "markersize": 4, "capsize": 2}
        left.errorbar(rows["sensitive_rank"], 100 * rows["value"], yerr=100 * rows["standard_error"], fmt="o-", **style)
        alone = results[(results["label"] == "none") & (results["task"] == task)]
        left.axhline(100 * alone["value"].iloc[0], color=f"C{number}", linewidth=0.8, linestyle="--")
    rows = ranked.drop_duplicates("label")
    right.plot(rows["sensitive_rank"], 100 * rows["over_thresholds"], "o-", color="C3", markersize=4)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("rank in the last layers")
    left.set(ylabel="% right (dashed: thresholds alone)", title="(a) accuracy")
    right.set(ylabel="% above thresholds alone", title="(b) perplexity", ylim=(0, None))
    left.legend()
    return figure


def rank_sentence(results: pd.DataFrame, last: pd.DataFrame) -> str:
    """What the rank of the last layers changes, from the smallest to the largest."""
    ranked = results[results["kind"] == "low_rank"].sort_values("sensitive_rank")
    means = ranked.groupby("sensitive_rank").agg(value=("value", "mean"), cost=("over_thresholds", "first"))
    missed = last[last["kind"] == "low_rank"].groupby("sensitive_rank")["false_negatives"].mean()
    low, high = means.index.min(), means.index.max()
    return (
        f"From rank {low} to {high} in the last layers, the active neurons missed there fall from {missed[low]:.0%} to "
        f"{missed[high]:.0%}, the cost in perplexity goes from {means['cost'][low]:+.1%} to {means['cost'][high]:+.1%} "
        f"and mean accuracy from {means['value'][low]:.1%} to {means['value'][high]:.1%}; thresholds alone reach "
        f"{results.loc[results['label'] == 'none', 'value'].mean():.1%}."
    )


def paper_shares() -> pd.DataFrame:
    """What the paper's own predictors weigh beside their models, from shapes and ranks (B.3, C.1, C.2).

    Rows with quantity, model, value (percent) and evidence "modelled".
    """
    rows = []
    for model, ranks, hidden, ffn, others in PAPER_RANKS:
        weights = sum(layers * rank for layers, rank in ranks) * (hidden + ffn)
        rows.append({"quantity": "predictors' share of the weights", "model": model, "value": 100 * weights / others})
    return pd.DataFrame(rows).assign(evidence="modelled")


# (layers, rank) of the predictors, width and FFN, and the weights that they are set beside: of OPT all outside the
# embeddings (attention and FFN), of Falcon all of the model, with one key and one value head of 64
PAPER_RANKS = (
    ("opt-6.7b", ((28, 128), (4, 1024)), 4096, 16384, 32 * (4 * 4096**2 + 2 * 4096 * 16384)),
    ("falcon-7b", ((28, 256), (4, 1152)), 4544, 18176, 65024 * 4544 + 32 * (2 * 4544 + 128 + 2 * 18176) * 4544),
)
