"""A plan: every way of running this model on this machine, with its speed and its price, and the ways to take.

    found = plan(open_target("llama2-7b"), dram_bytes=6_000_000_000)
    found.table     # a row a way, the fastest first
    found.choices   # the fastest way within the loss, and a faster one just above it, with their commands

Speeds are modelled from rates that are measured once (`toolkit.planner.rates`). Their ranges come from
the notebook `beyond/planner`, which measures how far off such predictions are. Quality is measured, of this model or of
an embedded one that is named (`toolkit.planner.prices`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, nan

import pandas as pd

from toolkit import paths
from toolkit.costs.probe import describe
from toolkit.errors import UserError
from toolkit.planner import sizes
from toolkit.planner.by_bytes import CUDA, bounds, gpu_ways, limit_on_gpu
from toolkit.planner.choices import Choice, choose, digits, just_above, price_text, size_text
from toolkit.planner.prices import TEXT, Quality, price_of
from toolkit.planner.rates import are_kept
from toolkit.planner.speed import Speed, dram_for_weights, speed, this_machine
from toolkit.planner.target import Target
from toolkit.planner.ways import RIVAL, PlannedWay
from toolkit.quality.corpora import check_corpus

LOSS = 0.05  # of perplexity that a plan accepts unless told otherwise
PROMPT_TOKENS = 64
BUSY = 0.25  # share of disturbed turns from which rates are not to be trusted
ENDS = (0.1, 0.9)  # quantiles of a range
FEWEST = 4  # measurements that make a range
RACED = "beyond/planner/table.csv"  # of results


@dataclass(frozen=True)
class Recommendation:
    """The ways for a model on a machine.

    table: a row a way, the fastest first. Columns: way; tokens_s, low and high (tokens a second; the range is NaN where
        `beyond/planner` measured too few such ways); first_s (until the first token after a prompt); read_mb (from the
        disk, a token); dram_mb (of weights and buffers); memory (share of layers or experts in memory); limit ("disk",
        "DRAM", "compute", "GPU" or "copies"); relative (perplexity over that of the dense model; NaN if nobody has
        measured it), relative_low, relative_high, quality_of (the model that it was measured with, or why that does not
        count), guess (that is another model); at_best (the speed is a limit by bytes, not a prediction); gpu; within
        (the loss); rival (of llama.cpp); runs_here; evidence.
    left_out: for each way that does not fit, a sentence that says how much it takes.
    choices: the way to take, and a faster one at a price just above the loss, if there is one.
    advice: what else would help, a sentence each.
    """

    target: Target
    dram_bytes: int
    table: pd.DataFrame
    left_out: tuple[str, ...]
    choices: tuple[Choice, ...]
    advice: tuple[str, ...]


def plan(
    target: Target,
    dram_bytes: int | None = None,
    loss: float = LOSS,
    measure: bool = False,
    text: str = TEXT,
    prompt_tokens: int = PROMPT_TOKENS,
    fresh: bool = False,
    device_bytes: int | None = None,
    measuring: Callable[[pd.DataFrame], None] = lambda bounds: None,
) -> Recommendation:
    """The ways of running a model within so many bytes of DRAM; None takes nine tenths of what is free.

    `loss` is the share by which perplexity may grow. `measure` evaluates this model now, on a few windows of `text`;
    `fresh` measures the machine again. Before a machine is measured, `measuring` gets the table of `bounds`.
    `device_bytes` limits the GPU's memory. Raises `UserError` for a budget below the smallest way (the message says
    how much that takes), a machine that cannot be probed, or `device_bytes` without a GPU.
    """
    if loss < 0:
        raise UserError(f"loss={loss}: expected a share from 0, such as 0.05")
    check_corpus(text)
    if measure and not target.loadable:
        raise UserError(f"{target.name}: of this model no weights can be loaded: leave --measure out")
    has_gpu = bool(describe()["gpu"])
    if device_bytes is not None and not has_gpu:
        raise UserError(
            f"{device_bytes / 1e6:.0f} MB of GPU memory: torch sees no GPU here; leave --device-memory out, or name "
            "another machine with --machine"
        )
    dram = dram_for_weights(dram_bytes)
    moved = bounds(target, dram)
    if moved.empty and not has_gpu:
        raise _too_small(target, dram)
    if fresh or not are_kept():
        measuring(moved)
    here = this_machine(dram, fresh)
    known = {way.name: way for way in target.ways}
    on_gpu = {way.name: way for way in gpu_ways(bool(target.shape.experts))} if here.profile.device else {}
    ranges, rows, left_out = measured_ranges(), [], []
    for way in (*known.values(), *on_gpu.values()):
        try:
            if way.name in on_gpu:
                found = limit_on_gpu(target.shape, way, here, device_bytes)
            else:
                found = speed(target.shape, way, here, prompt_tokens)
        except UserError as error:
            left_out.append(str(error))
            continue
        ratios = (nan, nan) if way.file else ranges.get(way.kind, (nan, nan))  # files were not raced
        row = _row(way, found, price_of(target, way, text, measure), ratios)
        rows.append(row | {"gpu": way.name in on_gpu})
    if not any(row["runs_here"] for row in rows):
        raise _too_small(target, dram)
    table = pd.DataFrame(rows).sort_values("tokens_s", ascending=False, kind="stable", ignore_index=True)
    table["within"] = table["relative"] <= 1 + loss
    limits = {"--dram": dram_bytes, "--device-memory": device_bytes}
    choices = tuple(choose(table, loss, target, known | on_gpu, limits))
    first = known.get(choices[0].way)
    spare = sizes.footprint(target.shape, first).all_bytes - here.dram_bytes if first else 0
    advice = tuple(_advice(target, table, choices, loss, spare, here.rates.disturbed))
    return Recommendation(target, dram, table, tuple(left_out), choices, advice)


def measured_ranges() -> dict[str, tuple[float, float]]:
    """By kind of way, the ratios measured / predicted between which four of five measurements lie.

    They are those of the last run of `beyond/planner`, or without one those of kept results, which are of other
    machines. Kinds with fewer than `FEWEST` measurements are left out.
    """
    own, kept = paths.results_dir() / RACED, (paths.root() / "results" / "reference").glob(f"*/{RACED}")
    files = [own] if own.is_file() else sorted(kept)
    if not files:
        return {}
    races = [pd.read_csv(file, low_memory=False).query("part == 'race' and disturbed < 0.5") for file in files]
    table = pd.concat(races)
    ratios = (table["tokens_per_s"] / table["predicted_per_s"]).groupby(table["kind"])
    return {kind: tuple(rows.quantile([*ENDS])) for kind, rows in ratios if len(rows) >= FEWEST}


def _row(way: PlannedWay, found: Speed, quality: Quality, ratios: tuple[float, float]) -> dict[str, object]:
    low, high = (nan, nan) if found.at_best else ratios
    row: dict[str, object] = {"way": way.name, "tokens_s": found.tokens_s}
    row |= {"low": found.tokens_s * low, "high": found.tokens_s * high}
    row |= {"first_s": found.first_s, "read_mb": found.read_bytes / 1e6, "dram_mb": found.dram_bytes / 1e6}
    row |= {"memory": found.held, "limit": found.limit, "at_best": found.at_best, "runs_here": way.runs_here}
    row |= {"relative": quality.ratio, "relative_low": quality.low, "relative_high": quality.high}
    row |= {"quality_of": quality.model, "guess": quality.guess}
    return row | {"rival": way.kind == RIVAL, "evidence": "modelled"}


def _too_small(target: Target, dram_bytes: int) -> UserError:
    """The error of a memory below what the smallest way needs."""
    every = bounds(target, inf)
    least = every.loc[every["needed_mb"].idxmin()]
    return UserError(
        f"{target.name}: {int(dram_bytes / 1e6)} MB of DRAM are too few. The smallest way, {least['way']}, takes "
        f"{ceil(least['needed_mb'])} MB."
    )


def _advice(
    target: Target, table: pd.DataFrame, choices: Sequence[Choice], loss: float, missing_bytes: int, disturbed: float
) -> Iterator[str]:
    """Further help: other software, weights, or more memory. `missing_bytes` would hold all of the first choice."""
    if not target.loadable and any(choice.commands for choice in choices):
        yield "MODEL is the folder, or the id on the hub, that has the weights."
    # within the loss, and just above it, what is not among the choices, but may be faster than they
    others = table[table["rival"] | table["gpu"]]
    for place, choice in zip((others["within"], just_above(others, loss)), (choices[0], choices[-1]), strict=True):
        faster = others[place & (others["tokens_s"] > choice.row["tokens_s"])]
        for _, most in faster.groupby(["rival", "gpu"], sort=False).head(1).iterrows():
            yield _faster(most)
    if target.loadable and any(choice.row["guess"] for choice in choices):
        yield f"--measure evaluates {target.name} itself, in place of guesses."
    if disturbed >= BUSY:
        yield "The machine was measured beside other work: plan again with --fresh when it is idle."
    if choices[0].row["limit"] == "disk" and missing_bytes > 0:
        more = size_text(missing_bytes)
        yield f"{more} more of DRAM would hold all of {choices[0].way}, so that no token waits for the disk."


def _faster(row: pd.Series) -> str:
    """A sentence on a way that may be faster than a choice."""
    speed = f"{digits(row['tokens_s'])} tokens/s"
    speed = f"Perhaps faster: {row['way']}, at most {speed}" if row["at_best"] else f"Faster: {row['way']}, {speed}"
    how = f" (`run` with `{CUDA}`)" if row["gpu"] and not row["rival"] else ""
    unknown = "; nothing was measured with this GPU" if row["gpu"] else ""
    return f"{speed}{how}{unknown}. {price_text(row)}"
