"""LLM in a flash: what its techniques save of a token's reads and time (tables 2 and 3, figures 1 and 7).

Tables have a row for each machine, way and kind of evidence, per token:

- memory_gb: weights in memory, where measured with buffers and predictors;
- read_gb, gb_s, io_ms: what is read from the disk, how fast, and how long that takes;
- manage_ms, compute_ms, total_ms, tokens_per_s: measured only;
- predictor_ms, predictor_gb: parts of compute_ms and memory_gb, measured only.
"""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes

from toolkit.evidence.figures import first_on_top, stage_colours, whiskers
from toolkit.machines.machine import GB, Profile
from toolkit.measure.disturbance import starred
from toolkit.measure.replay import Replay
from toolkit.policies.neuron_ways import WAYS
from toolkit.simulation.neuron_reads import Reads, neuron_reads

STAGES = {"read": "io_ms", "manage": "manage_ms", "compute": "compute_ms", "total": "total_ms"}
BASELINES = {"speedup": "naive", "over_hybrid": "hybrid"}


def modelled_reads(machine: Profile, reads: Reads, ways: Sequence[str] = tuple(WAYS)) -> pd.DataFrame:
    """The cost model's rows for a machine: memory_gb, read_gb, gb_s and io_ms of each way."""
    rows = []
    for way in ways:
        found = neuron_reads(machine, reads, way)
        row = {"memory_gb": found.memory_bytes / GB, "read_gb": found.read_bytes / GB, "io_ms": found.seconds * 1e3}
        rows.append({"way": way, **row, "gb_s": found.read_bytes / GB / found.seconds})
    labels = {"profile": machine.id, "model": reads.model, "layers": reads.layers, "evidence": "modelled"}
    return pd.DataFrame(rows).assign(**labels)


def reads_of(replay: Replay) -> Reads:
    """The same token for the cost model."""
    shares = {"active": replay.active, "new": replay.new, "window": replay.window}
    return Reads(replay.model, replay.layers, depth=replay.depth, **shares)


def measured_ways(tokens: pd.DataFrame) -> pd.DataFrame:
    """The rows of this machine, from the tokens of `toolkit.measure.replay.replay_measurements`.

    Numbers of a repetition are medians over its tokens, those of the table medians over repetitions. total_ms_low and
    total_ms_high are the least and the most that a repetition gave; `ratios` has speedup and over_hybrid. `disturbed`
    is the share of repetitions that other work disturbed.
    """
    total = tokens[tokens["stage"] == "total"]
    groups = total.groupby("way", sort=False)
    table = groups[["memory_bytes", "predictor_bytes", "nbytes"]].median() / GB
    table.columns = ["memory_gb", "predictor_gb", "read_gb"]
    stages = _by_repetition(tokens, "seconds", ["way", "stage"]).unstack() * 1e3
    table = table.join(stages.rename(columns=STAGES).reindex(columns=[*STAGES.values()]))
    table["predictor_ms"] = 1e3 * _by_repetition(total, "predictor_s", ["way"])
    turns = 1e3 * total.groupby(["repetition", "way"], sort=False)["seconds"].median().unstack("way")
    table = table.assign(total_ms_low=turns.min(), total_ms_high=turns.max(), mode=groups["mode"].first())
    table = table.assign(disturbed=groups["disturbed"].mean())
    table = table.join(ratios(turns)).assign(tokens_per_s=1e3 / table["total_ms"])
    labels = {"profile": "this-machine", "evidence": "measured"} | total.iloc[0][["model", "layers"]].to_dict()
    return table.assign(gb_s=table["read_gb"] / table["io_ms"] * 1e3, **labels).reset_index()


def _by_repetition(tokens: pd.DataFrame, column: str, names: list[str]) -> pd.Series:
    """The median over repetitions of each repetition's median over tokens."""
    return tokens.groupby(["repetition", *names], sort=False)[column].median().groupby(names, sort=False).median()


def ratios(turns: pd.DataFrame, baselines: Mapping[str, str] = BASELINES) -> pd.DataFrame:
    """How many times as fast each way is as a baseline of the same repetition: median, least and most.

    `turns` has a row a repetition and a column a way. The table has a row a way and, for each ratio of `baselines`
    whose way took part, the ratio, <ratio>_low and <ratio>_high.
    """
    columns = {}
    for name, way in baselines.items():
        if way in turns:
            times = turns.rdiv(turns[way], axis=0)
            columns |= {name: times.median(), f"{name}_low": times.min(), f"{name}_high": times.max()}
    return pd.DataFrame(columns, index=turns.columns)


def stage_bars(axes: Axes, rows: pd.DataFrame) -> None:
    """A bar a way, as long as a token takes, measured: products, memory management, and the rest, waiting for reads.

    What is read while something is computed costs no time, so it is no part of the bar.
    """
    stages, names = ["compute", "manage", "read"], starred(rows, "way")
    colours, left = stage_colours(stages), 0.0
    parts = {stage: rows[STAGES[stage]].fillna(0) for stage in ("compute", "manage")}
    parts["read"] = (rows["total_ms"] - parts["compute"] - parts["manage"]).clip(lower=0)
    for stage, width in parts.items():
        label = "waiting for reads" if stage == "read" else stage
        axes.barh(names, width, left=left, height=0.6, color=colours[stage], label=label)
        left = left + width
    for place, total in enumerate(rows["total_ms"]):
        axes.annotate(
            f"{total:.0f}",
            (rows["total_ms_high"].iloc[place], place),
            xytext=(5, -3),
            textcoords="offset points",
            fontsize=8,
        )
    whiskers(axes, rows["total_ms_low"], rows["total_ms_high"])
    first_on_top(axes)
    model, layers = rows[["model", "layers"]].iloc[0]
    axes.set(xlabel="ms a token", title=f"this machine, {layers:.0f} layers of {model}")
    axes.legend(loc="lower right", fontsize=8)  # the last way is the quickest, so its bar leaves room
