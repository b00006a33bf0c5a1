"""LLM in a flash: the tables and figures of single techniques, bundling (5), the manager of memory (6), windows (7)."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from toolkit.activations.synthetic import UsageLaw
from toolkit.evidence.figures import HATCHES, first_on_top
from toolkit.machines.machine import Profile
from toolkit.measure.replay import Replay
from toolkit.measure.rewriting import MANAGER, REALLOCATION
from toolkit.measure.scattered import FIO, LONG, TOOL
from toolkit.papers.flash_io import modelled_reads, reads_of
from toolkit.simulation.neuron_reads import Reads, part_bytes

KIB = 1024
HIDDEN = {"opt-6.7b": 4096, "falcon-7b": 4544}  # FFNs of an up and a down matrix
ELEMENT_BYTES = {"float32": 4, "float16": 2}
LAYOUTS = {"split": 1, "bundled": 2}  # rows or columns in one read
VOCABULARY, POSITIONS = 50272, 2050  # of OPT
PREDICTOR_RANK = 128  # of most layers (FLASH, appendix C.1)


def chunk_sizes() -> pd.DataFrame:
    """KiB of one read by model, type and layout, and the growth by bundling: arithmetic."""
    rows = [
        {"model": model, "dtype": dtype, "layout": layout, "chunk_kib": count * hidden * size / KIB, "growth": count}
        for model, hidden in HIDDEN.items()
        for dtype, size in ELEMENT_BYTES.items()
        for layout, count in LAYOUTS.items()
    ]
    return pd.DataFrame(rows).assign(evidence="modelled", profile="shapes")


def modelled_throughput(machine: Profile, cells: pd.DataFrame) -> pd.DataFrame:
    """GB/s of a machine's disk for the chunks and the depth of measured `cells`."""
    chosen = cells.drop_duplicates("layout")[["model", "layout", "chunk_bytes", "depth"]]
    rates = [machine.storage.read_gb_s(row.chunk_bytes, row.depth) for row in chosen.itertuples()]
    return chosen.assign(gb_s=rates, profile=machine.id, evidence="modelled", tool="model")


def measured_throughput(turns: pd.DataFrame) -> pd.DataFrame:
    """Medians over the turns of `toolkit.measure.scattered.scattered_reads`, with their quartiles."""
    keys = ["model", "tool", "layout", "chunk_bytes", "depth", "mode"]
    groups = turns.groupby(keys, sort=False)["gb_s"]
    found = pd.DataFrame({"gb_s": groups.median(), "low": groups.quantile(0.25), "high": groups.quantile(0.75)})
    return found.reset_index().assign(profile="this-machine", evidence="measured")


def turn_ratios(turns: pd.DataFrame) -> dict[str, float]:
    """Medians over turns: our bundled reads over split ones; ours over fio's by layout and burst (NaN without it)."""
    wide = turns.pivot_table(index="repetition", columns=["tool", "layout"], values="gb_s")
    ratios = {"bundling": wide[TOOL, "bundled"] / wide[TOOL, "split"]}
    for layout in LAYOUTS:
        for tool, burst in ((TOOL, "a layer's burst"), (LONG, "long bursts")):
            ratios[f"{layout}, {burst}"] = wide[tool, layout] / wide.get((FIO, layout), np.nan)
    return {name: float(values.median()) for name, values in ratios.items()}


def throughput_figure(table: pd.DataFrame) -> Figure:
    """GB/s of scattered reads, split beside bundled, for each tool and machine; whiskers are quartiles."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    names = list(dict.fromkeys(table["tool"] + ", " + table["profile"]))
    for number, layout in enumerate(LAYOUTS):
        rows = table[table["layout"] == layout]
        places = [names.index(name) + 0.36 * (number - 0.5) for name in rows["tool"] + ", " + rows["profile"]]
        ends = (rows["gb_s"] - rows["low"]).fillna(0), (rows["high"] - rows["gb_s"]).fillna(0)
        bars = axes.barh(places, rows["gb_s"], height=0.34, xerr=ends, color=f"C{number}", label=layout)
        for bar, kind in zip(bars, rows["evidence"], strict=True):
            bar.set(hatch=HATCHES[kind], edgecolor="white")
    axes.set_yticks(range(len(names)), names)
    first_on_top(axes)
    axes.set(xlabel="GB/s of scattered reads; model hatched")
    axes.legend(title="a neuron's row and column")
    return figure


def rewritten(tokens: pd.DataFrame) -> pd.DataFrame:
    """Medians over the tokens of `toolkit.measure.rewriting.rewriting`, by way and window.

    Columns more: rewritten_mb, ms, held_share (of the layer's neurons), rewritten_share (percent of the layer's FFN).
    """
    found = tokens.groupby(["model", "way", "window"], sort=False).median(numeric_only=True).reset_index()
    megabytes = found["rewritten"] * found["row_bytes"] / 1e6
    percent = 100 * found["rewritten"] / found["neurons"]
    found = found.assign(held_share=found["held"] / found["neurons"], rewritten_share=percent, evidence="measured")
    return found.assign(rewritten_mb=megabytes, ms=found["seconds"] * 1e3)


def rewriting_figure(table: pd.DataFrame) -> Figure:
    """Bytes rewritten, and the time of it, over the share of neurons in memory."""
    figure, (moved, time) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    for way, rows in table.groupby("way", sort=False):
        share = 100 * rows["held_share"]
        moved.plot(share, rows["rewritten_mb"], "o-", label=way)
        time.plot(share, rows["ms"], "o-", label=way)
    for axes, words in ((moved, "MB rewritten"), (time, "ms")):
        axes.set(xlabel="neurons in memory, %", ylabel=f"{words} a token and layer", ylim=(0, None))
    moved.legend()
    return figure


def rewriting_words(table: pd.DataFrame) -> str:
    """What both ways rewrite with the smallest and the largest window, and in what time."""
    rows = table.set_index(["way", "window"])
    parts = []
    for window in (table["window"].min(), table["window"].max()):
        ours, naive = rows.loc[(MANAGER, window)], rows.loc[(REALLOCATION, window)]
        parts.append(
            f"with a window of {window} ({ours['held_share']:.0%} of the neurons in memory) swapping rewrites "
            f"{ours['rewritten_mb']:.1f} MB in {ours['ms']:.1f} ms a layer, where {ours['changed']:.0f} rows go, and "
            f"reallocation {naive['rewritten_mb']:.1f} MB in {naive['ms']:.1f} ms"
        )
    return "; ".join(parts)


def for_window(replay: Replay, window: int, tokens: int) -> Replay:
    """The same trace's law with another window."""
    law = UsageLaw.fit(replay.active, exponent=1, new=replay.new, tokens=replay.window + 1)
    given = {"active": replay.active, "fired": replay.fired, "new": law.new(window + 1), "window": window}
    shared = {"repetitions": replay.repetitions, "depth": replay.depth, "seed": replay.seed, "tokens": tokens}
    return Replay(replay.model, replay.layers, ("bundling",), **given, **shared)


def held_share(replay: Replay) -> float:
    """The share of a layer's neurons that memory has room for: of the window and one token more (appendix C.1)."""
    law = UsageLaw.fit(replay.active, exponent=1, new=replay.new, tokens=replay.window + 1)
    return law.aggregated(replay.window + 1)


def modelled_windows(machine: Profile, base: Replay, windows: Sequence[int], layers: int) -> pd.DataFrame:
    """The cost model's row of the last way, for each window."""
    found = []
    for window in windows:
        reads = Reads(**{**vars(reads_of(for_window(base, window, 1))), "layers": layers})
        found.append(modelled_reads(machine, reads, ["bundling"]).assign(window=window))
    return pd.concat(found, ignore_index=True)


def memory_shares(model: str, layers: int, held_share: float) -> pd.DataFrame:
    """Percent of OPT's weights in memory by part, where `held_share` of the neurons is held (FLASH, appendix C.1)."""
    sizes, hidden = part_bytes(model, 1), HIDDEN[model]
    neurons = sizes["ffn"] // (2 * hidden)
    parts = {"ffn, whole": layers * sizes["ffn"], "attention": layers * sizes["attention"]}
    parts["embeddings"] = (VOCABULARY + POSITIONS) * hidden
    whole = sum(parts.values())
    parts["predictor"] = layers * PREDICTOR_RANK * (hidden + neurons)
    parts["ffn"] = held_share * parts["ffn, whole"]
    parts["total"] = sum(parts[name] for name in ("predictor", "embeddings", "attention", "ffn"))
    rows = [{"quantity": name, "percent": 100 * value / whole} for name, value in parts.items()]
    return pd.DataFrame(rows).assign(model=model, profile="flash-m1-max", evidence="modelled")


def trade_off_figure(table: pd.DataFrame, bytes_of: dict[str, float]) -> Figure:
    """Reading (and, measured, the whole token) over the share of the layers' weights in memory, by window."""
    figure, panels = plt.subplots(1, len(bytes_of), figsize=(4.3 * len(bytes_of), 3.4), layout="constrained")
    for axes, (profile, whole) in zip(np.atleast_1d(panels), bytes_of.items(), strict=True):
        rows = table[table["profile"] == profile]
        rows = rows.assign(share=100 * rows["memory_gb"] / whole)
        axes.margins(x=0.08, y=0.15)  # room for the numbers beside the outermost points
        for evidence, style in (("measured", "o-"), ("modelled", "s--")):
            found = rows[rows["evidence"] == evidence]
            if found.empty:
                continue
            axes.plot(found["share"], found["io_ms"], style, color="C0", label=f"reading, {evidence}")
            if evidence == "measured":
                axes.plot(found["share"], found["total_ms"], style, color="C1", label="whole token, measured")
        for row in rows[rows["evidence"] == rows["evidence"].iloc[0]].itertuples():
            place = {"textcoords": "offset points", "xytext": (3, 5), "fontsize": 8}
            axes.annotate(f"{row.window}", (row.share, row.io_ms), **place)
        axes.set(xlabel="weights of the layers in memory, %", ylabel="ms a token", ylim=(0, None), title=profile)
        axes.legend()
    return figure


def window_words(table: pd.DataFrame) -> str:
    """How reading falls and memory grows from the smallest to the largest window."""
    parts = []
    for (profile, evidence), rows in table.groupby(["profile", "evidence"], sort=False):
        first, last = rows.iloc[0], rows.iloc[-1]
        parts.append(
            f"{profile} ({evidence}): a window of {last.window} instead of {first.window} takes reading from "
            f"{first.io_ms:.0f} to {last.io_ms:.0f} ms and memory from {first.memory_gb:.2f} to {last.memory_gb:.2f} GB"
        )
    return "; ".join(parts)
