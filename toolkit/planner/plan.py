"""A plan: every way of running this model on this machine, with its speed and its price, and the ways to take.

    found = plan(open_target("llama2-7b"), memory_bytes=6_000_000_000)
    found.table     # a row a way, the fastest first
    found.choices   # the fastest way within the loss, and a faster one just above it, with their commands

Speeds are modelled from rates that are measured once (`toolkit.planner.rates`). Their ranges say how far off such
predictions were (`toolkit.planner.ranges`). Quality is measured, of this model or of an embedded one that is named
(`toolkit.planner.prices`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, nan

import pandas as pd

from toolkit.errors import UserError
from toolkit.machines.probe import describe
from toolkit.offload.budget import BudgetError
from toolkit.planner import sizes
from toolkit.planner.by_bytes import CUDA, bounds, gpu_ways, limit_on_gpu
from toolkit.planner.choices import Choice, choose, digits, just_above, price_text, size_text
from toolkit.planner.memory import Beside, check_kv_type
from toolkit.planner.plan_table import plan_html, plan_text
from toolkit.planner.prices import TEXT, Quality, price_of
from toolkit.planner.ranges import load_ranges
from toolkit.planner.rates import are_kept
from toolkit.planner.speed import Machine, Speed, dram_for_weights, speed, this_machine
from toolkit.planner.target import Target
from toolkit.planner.ways import RIVAL, PlannedWay
from toolkit.quality.corpora import check_corpus

LOSS = 0.05  # of perplexity that a plan accepts unless told otherwise
PROMPT_TOKENS = 64
BUSY = 0.25  # share of disturbed turns from which rates are not to be trusted


@dataclass(frozen=True, repr=False)
class Recommendation:
    """The ways for a model on a machine.

    dram_bytes: for weights and buffers. memory_bytes: the limit of the whole process, if there is one; then
        `dram_bytes` is what it leaves for layers.
    table: a row a way, the fastest first. Columns: way; tokens_s, low and high (tokens a second; the range is NaN where
        `beyond/planner` measured too few such ways); first_s (until the first token after a prompt); read_mb (from the
        disk, a token); dram_mb (of weights and buffers); needs_mb (the least memory of the process, if that is
        limited); held (share of layers or experts in memory); limit ("disk", "DRAM", "compute", "GPU" or "copies");
        relative (perplexity over that of the dense model; NaN if nobody has
        measured it), relative_low, relative_high, quality_of (the model that it was measured with, or why that does not
        count), guess (that is another model); at_best (the speed is a limit by bytes, not a prediction); gpu; within
        (the loss); rival (of llama.cpp); runs_here; evidence.
    left_out: for each way that does not fit, a sentence that says how much it takes.
    choices: the way to take, and a faster one at a price just above the loss, if there is one.
    advice: what else would help, a sentence each.
    """

    target: Target
    dram_bytes: int
    memory_bytes: int | None
    table: pd.DataFrame
    left_out: tuple[str, ...]
    choices: tuple[Choice, ...]
    advice: tuple[str, ...]

    def __repr__(self) -> str:
        """The text that the command prints."""
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)


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
    memory_bytes: int | None = None,
    kv_type: str | None = None,
) -> Recommendation:
    """The ways of running a model within so many bytes of DRAM; None takes nine tenths of what is free.

    `memory_bytes` is a limit of the whole process in its place: each way has what its process leaves for weights.
    `loss` is the share by which perplexity may grow. `measure` evaluates this model now, on a few windows of `text`;
    `fresh` measures the machine again. Before a machine is measured, `measuring` gets the table of `bounds`.
    `device_bytes` limits the GPU's memory. `kv_type` is the type of keys and values of a GGUF file that runs without
    torch, which `memory_bytes` counts. Raises `UserError` for a budget below the smallest way (the message says how
    much that takes), a machine that cannot be probed, `device_bytes` without a GPU, or a `kv_type` of another model.
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
    if memory_bytes is not None and dram_bytes is not None:
        raise UserError("memory_bytes limits the process, dram_bytes its weights: give one of them")
    check_kv_type(target.file, target.name, kv_type)
    beside = Beside.of(target, prompt_tokens, kv_type) if memory_bytes is not None else Beside(0, 0, 0)
    dram = max(0, memory_bytes - beside.least) if memory_bytes is not None else dram_for_weights(dram_bytes)
    moved = bounds(target, dram)
    if moved.empty and not has_gpu:
        raise _too_small(target, dram, memory_bytes, beside)
    if fresh or not are_kept():
        measuring(moved)
    here = this_machine(dram, fresh)

    def within(way: PlannedWay) -> Machine:
        own = beside.bytes_of(way)
        return here if memory_bytes is None else replace(here, dram_bytes=max(0, memory_bytes - own))

    known = {way.name: way for way in target.ways}
    on_gpu = {way.name: way for way in gpu_ways(bool(target.shape.experts))} if here.profile.device else {}
    ranges, rows, left_out = load_ranges(), [], []
    for way in (*known.values(), *on_gpu.values()):
        try:
            if way.name in on_gpu:
                found = limit_on_gpu(target.shape, way, here, device_bytes)
            else:
                found = speed(target.shape, way, within(way), prompt_tokens)
        except BudgetError as error:
            own = "" if memory_bytes is None else f", and {beside.bytes_of(way) / 1e6:.0f} MB beside it"
            left_out.append(f"{error}{own}")
            continue
        except UserError as error:
            left_out.append(str(error))
            continue
        ratios = (nan, nan) if way.file else ranges.get(way.kind, (nan, nan))  # files were not raced
        row = _row(way, found, price_of(target, way, text, measure), ratios)
        least = beside.bytes_of(way) + sizes.footprint(target.shape, way).needed_bytes
        rows.append(row | {"gpu": way.name in on_gpu, "needs_mb": nan if memory_bytes is None else least / 1e6})
    if not any(row["runs_here"] for row in rows):
        raise _too_small(target, dram, memory_bytes, beside)
    table = pd.DataFrame(rows).sort_values("tokens_s", ascending=False, kind="stable", ignore_index=True)
    table["within"] = table["relative"] <= 1 + loss
    limits = {"--memory": memory_bytes, "--dram": dram_bytes, "--device-memory": device_bytes}
    choices = tuple(choose(table, loss, target, known | on_gpu, limits, kv_type))
    first = known.get(choices[0].way)
    spare = sizes.footprint(target.shape, first).all_bytes - within(first).dram_bytes if first else 0
    advice = tuple(_advice(target, table, choices, loss, spare, here.rates.disturbed))
    return Recommendation(target, dram, memory_bytes, table, tuple(left_out), choices, advice)


def _row(way: PlannedWay, found: Speed, quality: Quality, ratios: tuple[float, float]) -> dict[str, object]:
    low, high = (nan, nan) if found.at_best else ratios
    row: dict[str, object] = {"way": way.name, "tokens_s": found.tokens_s}
    row |= {"low": found.tokens_s * low, "high": found.tokens_s * high}
    row |= {"first_s": found.first_s, "read_mb": found.read_bytes / 1e6, "dram_mb": found.dram_bytes / 1e6}
    row |= {"held": found.held, "limit": found.limit, "at_best": found.at_best, "runs_here": way.runs_here}
    row |= {"relative": quality.ratio, "relative_low": quality.low, "relative_high": quality.high}
    row |= {"quality_of": quality.model, "guess": quality.guess}
    return row | {"rival": way.kind == RIVAL, "evidence": "modelled"}


def _too_small(target: Target, dram_bytes: int, memory_bytes: int | None, beside: Beside) -> UserError:
    """The error of a memory below what the smallest way needs."""
    known, every = {way.name: way for way in target.ways}, bounds(target, inf).set_index("way")["needed_mb"]
    needed = {name: needed_mb + beside.bytes_of(known[name]) / 1e6 for name, needed_mb in every.items()}
    least = min(needed, key=needed.__getitem__)
    given, what = (dram_bytes, "of DRAM") if memory_bytes is None else (memory_bytes, "for the process")
    return UserError(
        f"{target.name}: {int(given / 1e6)} MB {what} are too few. The smallest way, {least}, takes "
        f"{ceil(needed[least])} MB."
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
        yield f"{more} more memory would hold all of {choices[0].way}, so that no token waits for the disk."


def _faster(row: pd.Series) -> str:
    """A sentence on a way that may be faster than a choice."""
    speed = f"{digits(row['tokens_s'])} tokens/s"
    speed = f"Perhaps faster: {row['way']}, at most {speed}" if row["at_best"] else f"Faster: {row['way']}, {speed}"
    how = f" (`run` with `{CUDA}`)" if row["gpu"] and not row["rival"] else ""
    unknown = "; nothing was measured with this GPU" if row["gpu"] else ""
    return f"{speed}{how}{unknown}. {price_text(row)}"
