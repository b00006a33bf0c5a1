"""LLM in a flash: what its techniques save of a token's reads and time (tables 2 and 3, figures 1 and 7).

Tables have a row for each machine, way and kind of evidence, per token:

- memory_gb: weights in memory, where measured with buffers and predictors;
- read_gb, gb_s, io_ms: what is read from the disk, how fast, and how long that takes;
- manage_ms, compute_ms, total_ms, tokens_per_s: measured only;
- predictor_ms, predictor_gb: parts of compute_ms and memory_gb, measured only.
"""

from collections.abc import Sequence

import pandas as pd

from toolkit.evidence.figures import stacked_bars, whiskers
from toolkit.extras import extra
from toolkit.machines.machine import GB, THIS_MACHINE, Profile
from toolkit.measure.summary import by_turn, summary
from toolkit.papers.flash.cost_model import SCHEMES, Reads, neuron_reads

with extra("lab"):
    from matplotlib.axes import Axes

COLUMNS = ["way", "memory_gb", "predictor_gb", "read_gb", "gb_s", "io_ms", "manage_ms", "compute_ms", "predictor_ms"]
COLUMNS += ["total_ms", "total_ms_low", "total_ms_high", "tokens_per_s", "speedup", "speedup_low", "speedup_high"]
COLUMNS += ["over_hybrid", "over_hybrid_low", "over_hybrid_high", "mode", "disturbed", "model", "layers"]
COLUMNS += ["profile", "evidence"]
OVER = {"speedup": {"way": "naive"}, "over_hybrid": {"way": "hybrid"}}


def modelled_reads(machine: Profile, reads: Reads, ways: Sequence[str] = tuple(SCHEMES)) -> pd.DataFrame:
    """The cost model's rows for a machine: memory_gb, read_gb, gb_s and io_ms of each way."""
    rows = []
    for way in ways:
        found = neuron_reads(machine, reads, way)
        row = {"memory_gb": found.memory_bytes / GB, "read_gb": found.read_bytes / GB, "io_ms": found.seconds * 1e3}
        rows.append({"way": way, **row, "gb_s": found.read_bytes / GB / found.seconds})
    labels = {"profile": machine.id, "model": reads.model, "layers": reads.layers, "evidence": "modelled"}
    return pd.DataFrame(rows).assign(**labels)


def measured_ways(spans: pd.DataFrame) -> pd.DataFrame:
    """The rows of this machine, from the spans of `replay_spans`: the `summary` of its turns.

    total_ms, and speedup and over_hybrid of `OVER`, have ranges.
    """
    turns = by_turn(spans, ["way", "model", "layers", "held_bytes", "predictor_bytes"])
    milliseconds = {"io": "read_s", "manage": "manage_s", "compute": "compute_s", "total": "seconds"}
    turns = turns.assign(**{f"{name}_ms": 1e3 * turns[column] for name, column in milliseconds.items()})
    turns = turns.assign(predictor_ms=1e3 * predictor_seconds(spans, turns))
    read_bytes = turns["stored_bytes"].where(turns["stored_bytes"] > 0, turns["read_bytes"])  # whole layers come ahead
    turns["read_gb"] = read_bytes / GB
    turns["manage_ms"] = turns["manage_ms"].where(turns["manage_ms"] > 0)  # none where layers come whole
    table = summary(turns, ["way"], ["total_ms"], OVER)
    table = table.assign(memory_gb=table["held_bytes"] / GB, predictor_gb=table["predictor_bytes"] / GB)
    table = table.assign(gb_s=1e3 * table["read_gb"] / table["io_ms"], profile=THIS_MACHINE, evidence="measured")
    return table[COLUMNS]


def predictor_seconds(spans: pd.DataFrame, turns: pd.DataFrame) -> pd.Series:
    """Seconds a token that predictors took, a part of `compute`, for each turn of a way."""
    turn, predictors = ["way", "repetition"], spans[spans["op"] == "predictor"]
    seconds = predictors["seconds"].groupby([predictors[name] for name in turn]).sum()
    found = seconds / spans.groupby(turn)["tokens"].first()
    return found.reindex(pd.MultiIndex.from_frame(turns[turn])).fillna(0).set_axis(turns.index)


def stage_bars(axes: Axes, rows: pd.DataFrame) -> None:
    """A bar a way, as long as a token takes, measured: products, memory management, and the rest, waiting for reads.

    A read beside a computation costs no time, so it is no part of the bar.
    """
    parts = pd.DataFrame({"compute": rows["compute_ms"], "manage": rows["manage_ms"].fillna(0)})
    parts["read"] = (rows["total_ms"] - parts.sum(axis=1)).clip(lower=0)
    ways = ["way", "evidence", "disturbed"]
    stages = rows[ways].join(parts).melt(ways, var_name="stage", value_name="seconds")
    stacked_bars(axes, stages, "way")
    whiskers(axes, rows["total_ms_low"], rows["total_ms_high"])
    for place, row in enumerate(rows.itertuples()):
        axes.text(row.total_ms_high, place, f"  {row.total_ms:.0f}", va="center", fontsize=9)
    axes.margins(x=0.1)
    model, layers = rows[["model", "layers"]].iloc[0]
    axes.set(xlabel="ms a token (read: waiting for reads)", title=f"this machine, {layers:.0f} layers of {model}")
