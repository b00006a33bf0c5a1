"""LLM in a flash: figure and sentence about the neurons that several tokens use, from `toolkit.studies.activations`."""

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter


def usage_figure(table: pd.DataFrame, window: int) -> Figure:
    """(a) Neurons used by k tokens; (b) neurons that the next token brings, over the tokens already in the window."""
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained")
    for number, (model, rows) in enumerate(table.groupby("model", sort=False)):
        by_tokens = rows.groupby("tokens")
        style = "-" if rows["evidence"].iloc[0] == "measured" else "--"
        for axes, column, before in zip(panels, ("used", "new"), (0, 1), strict=True):
            mean, low, high = (getattr(by_tokens[column], name)() for name in ("mean", "min", "max"))
            x = mean.index - before
            axes.plot(x, mean, style, color=f"C{number}", label=f"{model}, {rows['evidence'].iloc[0]}")
            if rows["layer"].notna().any():
                axes.fill_between(x, low, high, color=f"C{number}", alpha=0.15, label="its layers")
    for axes in panels:
        axes.axvline(window, color="gray", linewidth=0.8, linestyle=":")
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.set_ylim(0, None)
    panels[0].set(xlabel="tokens in a row", ylabel="share of a layer's neurons", title="(a) used by k tokens")
    panels[1].set(xlabel="tokens in the window", title="(b) loaded for the next token")
    panels[0].legend(loc="lower right")
    return figure


def usage_sentence(table: pd.DataFrame, window: int) -> str:
    """What a token needs, loads with a window and finds in memory."""
    words = []
    for model, rows in table.groupby("model", sort=False):
        mean = rows.groupby("tokens")[["used", "new"]].mean()
        words.append(
            f"{model} ({rows['evidence'].iloc[0]}): a token uses {mean.loc[1, 'used']:.1%} of the neurons; with a "
            f"window of {window} it loads {mean.loc[window + 1, 'new']:.1%}, and memory holds "
            f"{mean.loc[window, 'used']:.1%}"
        )
    return ". ".join(words) + "."
