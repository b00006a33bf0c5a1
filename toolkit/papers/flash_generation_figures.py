"""LLM in a flash: figures and sentences about generated text, from the tables of `flash_generation`."""

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

PARTS = {"io": "reads", "memory": "memory management", "compute": "compute"}  # of a token's time, as table 3 has them
GROWS = 1.1  # a load latency beyond this, over the one before, has grown


def parts_figure(table: pd.DataFrame) -> Figure:
    """Stacked bars: where the time of a token goes, by way."""
    figure, axes = plt.subplots(figsize=(7.2, 0.55 * len(table) + 1.8), layout="constrained")
    left = np.zeros(len(table))
    for number, (part, name) in enumerate(PARTS.items()):
        values = table[f"{part}_ms"].to_numpy()
        axes.barh(table["way"], values, left=left, color=f"C{number}", label=name)
        left += values
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.0f}", va="center", fontsize="small")
    axes.margins(x=0.08)
    axes.invert_yaxis()
    axes.set(
        xlabel="ms a token", title=f"{table['model'].iloc[0]}, {table['memory_share'].iloc[0]:.0%} of it in memory"
    )
    figure.legend(loc="outside lower center", ncols=len(PARTS))
    return figure


def long_figure(table: pd.DataFrame, smooth: int) -> Figure:
    """Load latency over a long text: each token, and a running median."""
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for number, (name, rows) in enumerate(table.groupby("sampling", sort=False)):
        axes.plot(rows["token"], rows["io_ms"], ".", markersize=2, alpha=0.35, color=f"C{number}")
        median = rows["io_ms"].rolling(smooth, center=True, min_periods=1).median()
        axes.plot(rows["token"], median, color=f"C{number}", label=f"{name} (median of {smooth} tokens)")
    axes.set(xlabel="token", ylabel="reads, ms a token", ylim=(0, 1.3 * table["io_ms"].quantile(0.98)))
    axes.legend()
    return figure


def growth(table: pd.DataFrame, column: str = "io_ms") -> pd.Series:
    """By sampling: the median of a column over the last quarter of the tokens over that of the second quarter."""
    quarter = table["token"] * 4 // (table["token"].max() + 1)
    medians = table.assign(quarter=quarter).groupby(["sampling", "quarter"], sort=False)[column].median().unstack()
    return medians[3] / medians[1]


def end_to_end_sentence(table: pd.DataFrame, least_share: float) -> str:
    """What the ways of `end_to_end` take, what guessing ahead gives, and how little memory would do."""
    ways = table.set_index("way")
    times = ", ".join(f"{way} {row.total_ms:.0f} ms ({row.speedup:.1f}×)" for way, row in ways.iterrows())
    share = table["memory_share"].iloc[0]
    words = f"With {share:.0%} of the model in memory a token takes, over naive loading: {times}."
    if "speculative" in ways.index:
        row = ways.loc["speculative"]
        pays = "pays" if row["total_ms"] < ways.loc["all", "total_ms"] else "does not pay"
        words += (
            f" Guessing ahead {pays}: the neurons in memory guess {row['acceptance']:.0%} of the tokens rightly, so a "
            f"pass gives {row['tokens_a_pass']:.1f} tokens."
        )
    half = "suffices" if least_share <= 0.5 else "does not suffice"
    return f"{words} What stays and one token's neurons need {least_share:.0%} of the model's bytes: half {half}."


def twin_sentence(twin: pd.DataFrame) -> str:
    """What all techniques give on layers of the paper's size, measured here."""
    row = twin[(twin["evidence"] == "measured") & (twin["way"] == "bundling")].iloc[0]
    return (
        f"{row['layers']:.0f} layers of {row['model']}, replayed here with random weights, take "
        f"{row['total_ms']:.0f} ms a token with all techniques, {row['speedup']:.1f} times as fast as naive loading "
        "(measured)."
    )


def growth_sentence(table: pd.DataFrame) -> str:
    """Whether loading slows down over the text."""
    grown, read = growth(table), growth(table, "mb")
    parts = ", ".join(f"{name} {ratio:.2f} times (bytes {read[name]:.2f})" for name, ratio in grown.items())
    verdict = "does not grow" if (grown <= GROWS).all() else "grows"
    return (
        f"Over {table['token'].max() + 1} tokens the load latency {verdict}: in the last quarter it is {parts} that of "
        "the second quarter (medians)."
    )


def texts_sentence(table: pd.DataFrame) -> str:
    """How long texts stay the same as the dense model's, and how likely the dense model takes them to be."""
    medians = table.groupby("way", sort=False)[["same_words", "dense_perplexity"]].median()
    same = "; ".join(f"{way}: {words:.0f}" for way, words in medians["same_words"].drop("dense").items())
    likely = "; ".join(f"{way}: {value:.1f}" for way, value in medians["dense_perplexity"].items())
    return (
        f"Words that are the same as in the dense model's text before the first other one (median): {same}. "
        f"Perplexity of the texts as the dense model reads them (median): {likely}."
    )
