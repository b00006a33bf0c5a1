"""LLM in a flash: what its techniques save of a token's reads and time (tables 2 and 3, figures 1 and 7).

Tables have a row for each machine, way and kind of evidence, per token:

- memory_gb: weights in memory, where measured with buffers and predictors;
- read_gb, gb_s, io_ms: what is read from the disk, how fast, and how long that takes;
- manage_ms, compute_ms, total_ms, tokens_per_s: measured only;
- predictor_ms, predictor_gb: parts of compute_ms and memory_gb, measured only.
"""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from toolkit.evidence.figures import first_on_top, stage_colours, whiskers
from toolkit.machines.machine import GB, Profile
from toolkit.measure.disturbance import starred
from toolkit.measure.replay import Replay
from toolkit.measure.summary import summary
from toolkit.policies.neuron_ways import WAYS
from toolkit.simulation.neuron_reads import Reads, neuron_reads

STAGES = {"read": "io_ms", "manage": "manage_ms", "compute": "compute_ms", "total": "total_ms"}
OVER = {"speedup": {"way": "naive"}, "over_hybrid": {"way": "hybrid"}}


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

    Numbers of a repetition are medians over its tokens, those of the table are `summary`'s over repetitions: total_ms,
    and speedup and over_hybrid of `OVER`, have ranges.
    """
    keys = ["way", "repetition"]
    total = tokens[tokens["stage"] == "total"].groupby(keys, sort=False)
    turns = total[["seconds", "predictor_s", "memory_bytes", "predictor_bytes", "nbytes"]].median()
    stages = tokens.groupby([*keys, "stage"], sort=False)["seconds"].median().unstack() * 1e3
    turns = turns.join(stages.rename(columns=STAGES).reindex(columns=[*STAGES.values()]))
    turns = turns.join(total[["model", "layers", "mode", "disturbed"]].first()).reset_index()
    table = summary(turns, ["way"], ["total_ms"], OVER)
    sizes = {"memory_gb": "memory_bytes", "predictor_gb": "predictor_bytes", "read_gb": "nbytes"}
    table = table.assign(**{name: table.pop(column) / GB for name, column in sizes.items()})
    table = table.assign(predictor_ms=1e3 * table.pop("predictor_s"), tokens_per_s=1 / table.pop("seconds"))
    rates = {"gb_s": table["read_gb"] / table["io_ms"] * 1e3, "profile": "this-machine", "evidence": "measured"}
    return table.assign(**rates)


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
