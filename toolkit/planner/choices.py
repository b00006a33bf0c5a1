"""The ways that a plan names: the fastest within the accepted loss, and a faster one just above it."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from toolkit.planner.by_bytes import CUDA
from toolkit.planner.target import Target
from toolkit.planner.ways import PlannedWay

ABOVE = 0.15  # of perplexity: a way with a loss up to so much larger than the accepted one is just above it
FASTER = 1.1  # times as fast: less is not worth a larger loss, since predictions are off by 15 % in the median
PROMPT = "The library of Alexandria"
LIMITS = {
    "disk": "The disk limits it: each token reads {read}.",
    "DRAM": "The bandwidth of DRAM limits it.",
    "compute": "The processor limits it: products take longer than their bytes.",
    "GPU": "The bandwidth of the GPU's memory limits it.",
    "copies": "Copies from DRAM to the GPU limit it.",
}


@dataclass(frozen=True)
class Choice:
    """A way that a plan names.

    row: of the plan's table. why: what it gives and costs, and what limits it. commands: what packs and runs it; empty
    where the toolkit does not run it.
    """

    row: pd.Series
    why: str
    commands: tuple[str, ...]

    @property
    def way(self) -> str:
        """The way's name."""
        return self.row["way"]


def choose(
    table: pd.DataFrame,
    loss: float,
    target: Target,
    known: Mapping[str, PlannedWay],
    limits: Mapping[str, int | None],
    kv_type: str | None = None,
) -> Iterator[Choice]:
    """The fastest way within the loss, then the fastest one of the toolkit just above it, if that is much faster.

    A price that is a guess counts like any other here, and `why` says that it is one. A limit by bytes is named only if
    no predicted way is within the loss.

    Args:
        table: that of a plan.
        loss: the share by which perplexity may grow.
        target: the model.
        known: the ways by their names.
        limits: bytes by option of `run`; None is no limit.
        kv_type: of keys and values of a file that is run as it is; None is its own.
    """
    predicted = ~table["at_best"].astype(bool)
    within = table["within"] & (table["runs_here"] | table["rival"])
    within &= predicted | ~(within & predicted).any()  # llama.cpp in 16 bits costs nothing: there always is one
    first = table.loc[table["tokens_s"].where(within).idxmax()]
    why = _why(first, loss)
    if first["rival"]:
        ours = (table["within"] & table["runs_here"]).any()
        why += " At this price the toolkit is slower." if ours else " No way of the toolkit is within the loss."
    yield Choice(first, why, _commands(target, known[first["way"]], limits, kv_type))
    above = table[just_above(table, loss) & table["runs_here"] & predicted]
    above = above[above["tokens_s"] > FASTER * first["tokens_s"]]
    if len(above):
        faster = table.loc[above["tokens_s"].idxmax()]
        yield Choice(faster, _why(faster, loss, first), _commands(target, known[faster["way"]], limits, kv_type))


def just_above(table: pd.DataFrame, loss: float) -> pd.Series:
    """Whether each way's price is above the loss, but not by much."""
    return ~table["within"] & (table["relative"] <= 1 + loss + ABOVE)


def digits(value: float, count: int = 3) -> str:
    """A number with so many significant digits, or all of a larger one."""
    return f"{value:,.0f}" if value >= 10 ** (count - 1) else f"{value:.{count}g}"


def size_text(nbytes: float) -> str:
    """A size in at most seven characters, such as 228 MB, 63.3 GB or 1.34 TB."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
    unit, scale = next(((unit, scale) for unit, scale in units if nbytes >= 0.9995 * scale), units[-1])
    return f"{digits(nbytes / scale)} {unit}"


def _why(row: pd.Series, loss: float, slower: pd.Series | None = None) -> str:
    """Why a way is named: the fastest within the loss, or one above it that is faster than `slower`."""
    place = f"Within a loss of {loss:.0%}" if slower is None else f"Just above a loss of {loss:.0%}"
    speed = f"{digits(row['tokens_s'])} tokens/s"
    if row["at_best"]:
        speed = f"at most {speed} by its bytes, which is a limit and no prediction"
    if slower is not None:
        speed += f", {row['tokens_s'] / slower['tokens_s']:.1f} times as fast"
    return f"{place}: {row['way']}, {speed}. {price_text(row)} " + LIMITS[row["limit"]].format(
        read=size_text(1e6 * row["read_mb"])
    )


def price_text(row: pd.Series) -> str:
    """A sentence on a price, and whether it is a guess."""
    if row["relative"] == 1 and not row["guess"]:  # no measurement gives exactly that
        return "It changes no weight."
    price = f"perplexity × {row['relative']:.2f}"
    if row["guess"]:
        return f"Its price, {price}, is a guess: it was measured with {row['quality_of']}."
    return f"Its price is {price}, measured with this model."


def _commands(
    target: Target, way: PlannedWay, limits: Mapping[str, int | None], kv_type: str | None
) -> tuple[str, ...]:
    """The commands; with MODEL in them for a model whose weights are not at hand."""
    if not way.runs_here:
        return ()
    model, folder = shlex.quote(target.name) if target.loadable else "MODEL", "-".join(re.findall(r"\w+", way.name))
    caps = [f"{option} {nbytes / 1e6:.10g}MB" for option, nbytes in limits.items() if nbytes]
    caps = [cap for cap in caps if CUDA in way.run or not cap.startswith("--device")]
    caps += [f"--kv-type {kv_type}"] if kv_type and way.file else []
    run = " ".join(
        filter(None, ["sparse-offload run", model if way.file else folder, *caps, way.run, f'--prompt "{PROMPT}"'])
    )
    return (run,) if way.file else (f"sparse-offload pack {model} {way.pack} --out {folder}", run)
