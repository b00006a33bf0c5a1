"""LLM in a flash: which neurons fire (sections 3.1, D and F), recorded and aggregated for its notebooks."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from toolkit import sources
from toolkit.activations import Trace, record
from toolkit.activations.statistics import aggregated_usage, coactivation, friends, sparsity
from toolkit.activations.synthetic import UsageLaw
from toolkit.cache import cached, cached_table
from toolkit.papers.flash_predictors import Setting, key_of, loaded, thresholds, tokens_of
from toolkit.policies.sliding_window import SlidingWindow
from toolkit.studies.forms import store

DENSE = "16 bits"
FILE = "trace.safetensors"
OPT = "opt-6.7b, drawn"
OPT_LAW = {"active": 0.10, "exponent": 1.0, "new": 0.024, "tokens": 5}  # predicted and loaded neurons of C.1
OPT_SHARES = {"embeddings": 0.03, "attention": 0.323, "predictors": 0.0125, "ffn": 0.6462}  # of the model (C.1)
HOT = 0.01  # of the neurons: the most used


@cache
def trace(setting: Setting, windows: int) -> Trace:
    """The trace of the thresholded model over evaluation text, kept."""

    def make(folder: Path) -> None:
        model, tokens = loaded(setting.model)[0], tokens_of(setting, "evaluation")
        limits, length = thresholds(setting), setting.sequence_length
        record(model, setting.model, tokens, setting.corpus, limits, windows, length).save(folder / FILE)

    code = sources.dependencies("toolkit.activations.recording", without=("toolkit.models.loading",))
    folder = cached("traces", key_of(setting) | {"trace_windows": windows}, code, make)
    return Trace.load(folder / FILE, setting.model)


def usage_table(found: Trace, tokens: int) -> pd.DataFrame:
    """Neurons that k tokens in a row use: measured on a trace, and modelled by the law of OPT 6.7B.

    Columns: model, layer (NaN where modelled), tokens (k), used, new (what the k-th token brings), evidence. The law
    has as many neurons predicted a token and loaded with a window of 4 as the paper says (C.1); all else follows.
    """
    law = UsageLaw.fit(**OPT_LAW)
    rows = [{"tokens": k, "used": law.aggregated(k), "new": law.new(k) if k > 1 else law.active} for k in _upto(tokens)]
    modelled = pd.DataFrame(rows).assign(model=OPT, evidence="modelled")
    measured = aggregated_usage(found, tokens).assign(model=found.model, evidence="measured")
    table = pd.concat([measured, modelled], ignore_index=True)
    return table.assign(used_percent=100 * table["used"], new_percent=100 * table["new"])


def _upto(tokens: int) -> range:
    return range(1, tokens + 1)


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


def friends_table(found: Trace, layer: int, ranks: Sequence[int], window: int) -> pd.DataFrame:
    """Co-activation of one layer: its friends by rank, and what bundles of friends read.

    Rows "friend" hold what `friends` gives; rows "quantity" a quantity, its value and its unit:

    - friend n: the mean share of a neuron's tokens that its n-th closest friend shares;
    - by chance: what it would be if neurons knew nothing of each other;
    - hot friends: neurons whose closest friend is among the most used hundredth;
    - read over needed: neurons read, each with its closest friend, over those that a window lacks; once as the paper
      does it, and once without those that came as a friend already.
    """
    pairs = friends(found, layer, ranks).assign(row="friend")
    rows = []
    for rank, group in pairs.groupby("rank"):
        rows.append((f"friend {rank}", 100 * group["together"].mean(), "percent"))
    closest = pairs[pairs["rank"] == 1]
    rows.append(("by chance", 100 * closest["usage"].mean(), "percent"))
    rows.append(("hot friends", 100 * _hot_share(found, layer, closest), "percent"))
    every, fewer = friend_reads(found.active(layer).numpy(), _friend_of(found, layer, closest), window)
    rows += [("read over needed", every, "ratio"), ("read over needed, friends not read twice", fewer, "ratio")]
    quantities = pd.DataFrame(rows, columns=["quantity", "value", "unit"]).assign(row="quantity", layer=layer)
    return pd.concat([pairs, quantities], ignore_index=True).assign(model=found.model, evidence="measured")


def friend_reads(active: np.ndarray, friend: np.ndarray, window: int) -> tuple[float, float]:
    """Neurons read over those lacking, where each comes with its friend: always, and unless it came as a friend.

    `active` [sequences, tokens, neurons] tells what each token needs; `friend` [neurons] the closest friend of each.
    The window holds what the last tokens needed. Neurons come in the order of their numbers.
    """
    needed = every = fewer = 0
    for sequence in active:
        kept = SlidingWindow(sequence.shape[1], window)
        for token in sequence:
            lacking = kept.step(np.flatnonzero(token)).loaded
            here: set[int] = set()
            for neuron in lacking.tolist():
                if neuron not in here:
                    here |= {neuron, int(friend[neuron])}
                    fewer += 2
            needed, every = needed + len(lacking), every + 2 * len(lacking)
    return every / needed, fewer / needed


def _friend_of(found: Trace, layer: int, closest: pd.DataFrame) -> np.ndarray:
    friend = np.arange(found.neurons[layer])  # a neuron that never fired is its own
    friend[closest["neuron"]] = closest["friend"]
    return friend


def _hot_share(found: Trace, layer: int, closest: pd.DataFrame) -> float:
    usage = found.active(layer).flatten(0, 1).float().mean(0)
    hot = usage.topk(max(1, round(HOT * len(usage)))).indices.numpy()
    return float(closest["friend"].isin(hot).mean())


def friends_figure(found: Trace, table: pd.DataFrame, layer: int, neuron: int) -> Figure:
    """(a) How often others fire with one neuron, by rank; (b) how often a neuron's friends fire with it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained")
    together = coactivation(found, layer)[neuron].sort(descending=True).values
    left.loglog(np.arange(1, len(together) + 1), together.clamp(min=1e-3), color="C0")
    left.set(
        xlabel="other neurons, by rank",
        ylabel="share of its tokens",
        ylim=(0.01, 1),
        title=f"(a) neuron {neuron} of layer {layer}",
    )
    pairs = table[table["row"] == "friend"]
    for number, (rank, rows) in enumerate(pairs.groupby("rank")):
        style = {"histtype": "step", "linewidth": 1.6, "color": f"C{number}"}
        right.hist(rows["together"], np.linspace(0, 1, 101), label=f"friend {rank:.0f}", **style)
    first = pairs[pairs["rank"] == 1]
    right.axvline(first["usage"].mean(), color="black", linewidth=0.8, linestyle=":", label="closest, by chance")
    right.set(xlabel="share of a neuron's tokens", ylabel="neurons", title="(b) friends of all neurons", xlim=(0, 1))
    right.xaxis.set_major_formatter(PercentFormatter(1, 0))
    right.legend()
    return figure


def friends_sentence(table: pd.DataFrame) -> str:
    """How often friends fire together, and why bundling them loses."""
    told = table[table["row"] == "quantity"].set_index("quantity")["value"]
    ranks = [name for name in told.index if name.startswith("friend ")]
    words = ", ".join(f"{name} {told[name]:.0f} %" for name in ranks)
    return (
        f"Shares of a neuron's tokens that friends have: {words} (friend 1 by chance {told['by chance']:.0f} %). For "
        f"{told['hot friends']:.0f} % of the neurons the closest friend is one of the most used hundredth, so bundles "
        f"of friends read {told['read over needed']:.2f} times the neurons needed, and "
        f"{told['read over needed, friends not read twice']:.2f} times if none that came as a friend is read again."
    )


def quantised_table(setting: Setting, forms: Sequence[str], windows: int) -> pd.DataFrame:
    """Share of neurons that fire in each layer, with the weights in 16 bits and in fewer; kept, a form by itself.

    Thresholds are those of the 16-bit model. Columns: model, form, layer, fired_percent, same (of the neurons that fire
    in either model, those that fire in both), evidence.
    """
    base = trace(setting, windows)
    tables = [sparsity(base).assign(form=DENSE, same=1.0)]
    for form in forms:

        def measure(form: str = form) -> pd.DataFrame:
            model = deepcopy(loaded(setting.model)[0])
            store(model, form)
            limits, text = thresholds(setting), tokens_of(setting, "evaluation")
            found = record(model, setting.model, text, setting.corpus, limits, windows, setting.sequence_length)
            same = [_same(one, other) for one, other in zip(base.bits, found.bits, strict=True)]
            return sparsity(found).assign(form=form, same=same)

        key = key_of(setting) | {"form": form, "trace_windows": windows}
        code = sources.dependencies("toolkit.activations.recording", "toolkit.studies.forms")
        tables.append(cached_table("quantised_activations", key, code, measure))
    table = pd.concat(tables, ignore_index=True)
    return table.assign(fired_percent=100 * (1 - table["sparsity"]), model=setting.model, evidence="measured")


def _same(one: torch.Tensor, other: torch.Tensor) -> float:
    both, either = (int(np.bitwise_count(bits.numpy()).sum(dtype=np.int64)) for bits in (one & other, one | other))
    return both / either if either else float("nan")


def small_device(bits: int = 4, weights: float = 7e9) -> pd.DataFrame:
    """Memory of a model in few bits, all of it and with all techniques of the paper (appendix F): an estimate.

    Shares of the model are those of OPT 6.7B (C.1), and its FFN holds what the law of its usage says of 5 tokens.
    """
    whole_gb = weights * bits / 8 / 1e9
    shares = OPT_SHARES | {"ffn": OPT_SHARES["ffn"] * UsageLaw.fit(**OPT_LAW).aggregated(OPT_LAW["tokens"])}
    rows = [("memory, whole", whole_gb), ("memory, all techniques", whole_gb * sum(shares.values()))]
    return pd.DataFrame(rows, columns=["quantity", "value"]).assign(unit="GB", model="7b", evidence="modelled")


def quantised_figure(table: pd.DataFrame) -> Figure:
    """Share of neurons that fire, by layer and form; and how many of them are the same."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6), layout="constrained")
    for number, (form, rows) in enumerate(table.groupby("form", sort=False)):
        style = {"color": f"C{number}", "label": form}
        left.plot(rows["layer"], rows["fired_percent"], **style)
        if form != DENSE:
            right.plot(rows["layer"], rows["same"], **style)
    left.set(xlabel="layer", ylabel="% of the neurons that fire", ylim=(0, None), title="(a) how many fire")
    right.set(xlabel="layer", ylim=(0, 1), title="(b) fire in both, of those in either")
    right.yaxis.set_major_formatter(PercentFormatter(1, 0))
    left.legend()
    return figure


def quantised_sentence(table: pd.DataFrame) -> str:
    """How many neurons fire in each form."""
    told = table.groupby("form", sort=False)[["fired_percent", "same"]].mean()
    rows = told.drop(index=DENSE).iterrows()
    words = "; ".join(f"{form} {row.fired_percent:.1f} %, {row.same:.0%} of them the same" for form, row in rows)
    return f"{told.loc[DENSE, 'fired_percent']:.1f} % of the neurons fire in {DENSE}; {words}."
