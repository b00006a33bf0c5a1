"""A plan: every way of running this model on this machine, with its speed and its price, the best first.

    found = plan(open_target("llama2-7b"), dram_bytes=6_000_000_000)
    found.table     # a row a way
    found.why       # one sentence
    found.commands  # they pack and run the first way

Speeds are modelled from rates that are measured once (`toolkit.planner.rates`). Their ranges come from
the notebook `beyond/planner`, which measures how far off such predictions are. Quality is measured, of this model or of
an embedded one that is named (`toolkit.planner.prices`).
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, nan

import pandas as pd

from toolkit import paths
from toolkit.costs.probe import describe
from toolkit.errors import UserError
from toolkit.planner import sizes
from toolkit.planner.by_bytes import CUDA, bounds, gpu_ways, limit_on_gpu
from toolkit.planner.prices import TEXT, Quality, price_of
from toolkit.planner.rates import are_kept
from toolkit.planner.speed import Machine, Speed, dram_for_weights, speed, this_machine
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

    table: a row a way, the way to take first, then those that no other way beats in both speed and quality, then the
        rest. Columns: way; tokens_s, low and high (tokens a second; the range is NaN where `beyond/planner` measured
        too few such ways); first_s (until the first token after a prompt); read_mb (from the disk, a token); dram_mb
        (of weights and buffers); memory (share of layers or experts in memory); limit ("disk", "DRAM", "compute", "GPU"
        or "copies"); relative (perplexity over that of the dense model; NaN if nobody has measured it), relative_low,
        relative_high, quality_of (the model that it was measured with, or why that does not count); at_best (the speed
        is a limit by bytes, not a prediction); gpu; front; within (the loss); rival (of llama.cpp); runs_here;
        evidence.
    left_out: for each way that does not fit, a sentence that says how much it takes.
    why: one sentence on the first way, and what limits it.
    commands: what packs and runs the first way; empty where the toolkit does not run it.
    advice: what else would help.
    """

    target: Target
    dram_bytes: int
    table: pd.DataFrame
    left_out: tuple[str, ...]
    why: str
    commands: tuple[str, ...]
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
        row = _row(way, found, price_of(target, way, text, measure), ranges.get(way.kind, (nan, nan)))
        rows.append(row | {"gpu": way.name in on_gpu})
    if not any(row["runs_here"] for row in rows):
        raise _too_small(target, dram)
    table = _ordered(pd.DataFrame(rows), loss)
    best = table.iloc[0]
    chosen = (known | on_gpu)[best["way"]]
    return Recommendation(
        target,
        dram,
        table,
        tuple(left_out),
        _why(best, loss),
        _commands(target, chosen, dram_bytes, device_bytes),
        tuple(_advice(target, table, chosen, here)),
    )


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
    return row | {"quality_of": quality.model, "rival": way.kind == RIVAL, "evidence": "modelled"}


def _ordered(table: pd.DataFrame, loss: float) -> pd.DataFrame:
    """The fastest way within the loss first, then the others on the front by speed, then the rest by speed.

    A way with a limit instead of a prediction comes first only if there is no other.
    """
    known = table["relative"].notna()
    predicted, within = ~table["at_best"].astype(bool), table["relative"] <= 1 + loss
    front = []
    for number, row in table.iterrows():
        beaten = known & (table["tokens_s"] > row["tokens_s"]) & (table["relative"] <= row["relative"])
        front.append(known[number] and not (beaten & (predicted | row["at_best"])).any())  # a limit beats no prediction
    table = table.assign(front=front, within=within)
    choice = within & predicted if (within & predicted).any() else within  # llama.cpp in 16 bits costs nothing
    first = table["tokens_s"].where(choice).idxmax()
    order = table.assign(first=table.index == first).sort_values(
        ["first", "front", "tokens_s"], ascending=False, kind="stable"
    )
    return order.drop(columns="first").reset_index(drop=True)


def _too_small(target: Target, dram_bytes: int) -> UserError:
    """The error of a memory below what the smallest way needs."""
    every = bounds(target, inf)
    least = every.loc[every["needed_mb"].idxmin()]
    return UserError(
        f"{target.name}: {int(dram_bytes / 1e6)} MB of DRAM are too few. The smallest way, {least['way']}, takes "
        f"{ceil(least['needed_mb'])} MB."
    )


def _why(best: pd.Series, loss: float) -> str:
    limits = {
        "disk": f"the disk limits it: each token reads {best['read_mb']:.0f} MB",
        "DRAM": "the bandwidth of DRAM limits it",
        "compute": "the processor limits it: products take longer than their bytes",
        "GPU": "the bandwidth of the GPU's memory limits it",
        "copies": "copies from DRAM to the GPU limit it",
    }
    price = f"perplexity × {best['relative']:.2f}, measured with {best['quality_of']}"
    at_best = " by bytes, which is a limit and no prediction," if best["at_best"] else ""
    return f"{best['way']} is the fastest way{at_best} within a loss of {loss:.0%} ({price}); {limits[best['limit']]}."


def _commands(target: Target, way: PlannedWay, dram_bytes: int | None, device_bytes: int | None) -> tuple[str, ...]:
    """The commands; with MODEL in them for a model whose weights are not at hand."""
    if way.pack is None:
        return ()
    pack = f"python -m toolkit pack {shlex.quote(target.name) if target.loadable else 'MODEL'} {way.pack} --out packed"
    limits = {"--dram": dram_bytes, "--device-memory": device_bytes if CUDA in way.run else None}
    caps = [f"{option} {nbytes / 1e6:.10g}MB" for option, nbytes in limits.items() if nbytes]
    return pack, " ".join(['python -m toolkit run packed --prompt "The library of Alexandria"', *caps, way.run]).strip()


def _advice(target: Target, table: pd.DataFrame, first: PlannedWay, machine: Machine) -> list[str]:
    """Further help: other software, weights, or more memory."""
    found, best = [], table.iloc[0]
    if best["rival"]:
        found.append(f"take {best['way']}: at this price nothing here is faster")
    elif not target.loadable:
        found.append("MODEL is the folder, or the id on the hub, that has the weights")
    faster = table[table["within"] & table["at_best"].astype(bool) & (table["tokens_s"] > best["tokens_s"])]
    for _, most in faster.sort_values("tokens_s", ascending=False).groupby("rival", sort=False).head(1).iterrows():
        words = f"perhaps faster: {most['way']}, {most['tokens_s']:.3g} tokens/s at most by its bytes"
        how = f" (`run` with `{CUDA}`)" if most["gpu"] and not most["rival"] else ""
        found.append(f"{words}{how}; nothing was measured with this GPU" if most["gpu"] else words)
    dearer = table[table["runs_here"] & ~table["at_best"].astype(bool) & ~table["within"] & table["relative"].notna()]
    dearer = dearer[dearer["tokens_s"] > best["tokens_s"]]
    if len(dearer):
        least = dearer.loc[dearer["relative"].idxmin()]
        price = f"perplexity × {least['relative']:.2f}, measured with {least['quality_of']}"
        found.append(f"faster at a higher price: {least['way']}, {least['tokens_s']:.3g} tokens/s ({price})")
    if target.loadable and best["quality_of"] != target.name:
        found.append(f"the price was measured with {best['quality_of']}: --measure evaluates {target.name} itself")
    if machine.rates.disturbed >= BUSY:
        found.append("the machine was measured beside other work: plan again with --fresh when it is idle")
    if best["limit"] == "disk":
        more = sizes.footprint(target.shape, first).all_bytes - machine.dram_bytes
        if more > 0:
            found.append(f"{_size(more)} more of DRAM would hold all of it, so that no token waits for the disk")
    return found


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
