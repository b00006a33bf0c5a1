"""One token through a whole model on this machine: methods, policies and other people's software side by side.

    passes = Passes(Workload("opt-1536"), layers=10, ways=default_ways(PASS_METHODS))
    pass_measurements(passes)      # beside pass_table(profile("endor-rtx4080"), ...)
    pair_ratios(passes, PAIRS)     # of toolkit.papers.endor.passes

The model is a twin with random weights (`toolkit.models.twins`); the device is the CPU. `toolkit.measure.model_passes`
times. Measurements are kept under `data/cache/measured/`, by machine, disk and code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError
from toolkit.files import make_folder
from toolkit.machines.machine import Profile
from toolkit.measure.accelerate import RIVAL
from toolkit.measure.llama_cpp import missing
from toolkit.measure.model_passes import PLACED, pass_spans
from toolkit.measure.rates import this_machine
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import measured, median_stages
from toolkit.models.workload import Workload
from toolkit.policies.methods import METHODS, RIVALS
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import POLICIES, Placed, Way, all_ways
from toolkit.simulation.cost_model import predict
from toolkit.simulation.tables import layer_of
from toolkit.timeline.spans import Timeline
from toolkit.timeline.tables import beside_dense, beside_measured

PASS_METHODS = ("dense", "endor", "endor_packed")  # ZSTD is left to single operations: it would take most of the time
REPETITIONS = 5
PLAIN_TYPES = ("llama.cpp F16", "llama.cpp Q8_0", "llama.cpp Q4_0")
WAY = ["method", "policy"]  # the labels of a way with all layers on disk
Pairs = Sequence[tuple[tuple[str, str], tuple[str, str]]]


@dataclass(frozen=True)
class Passes:
    """Passes to measure: a twin of `workload` with so many layers, run in each of the ways, in `repetitions` turns.

    `memory_bytes` is what each way may take for weights (`pass_spans`); None leaves the layers where the mapping says.
    """

    workload: Workload
    layers: int
    ways: Sequence[Placed]
    repetitions: int = REPETITIONS
    memory_bytes: int | None = None


def pass_measurements(passes: Passes, fresh: bool = False) -> pd.DataFrame:
    """One token as `pass_table` has it, measured, and for our own runtime modelled; more columns as in
    `operation_measurements`.

    Stages are those of a window over several tokens, divided by their number; `tokens` is that number and
    `stored_bytes` what one token must read. `mapping` is `storage` with every layer on disk; `published`, the paper's
    share of layers in memory; or `refilled` (`LayerMap.refilled`). Time in which no weight is read, decoded or
    multiplied is stage `other`, which the model leaves out. Raises `UserError` for a limit of memory, unknown names,
    less than one repetition, so few layers that buffers keep them all, a disk too small, or a way whose logits are not
    those of the model in memory.
    """
    if passes.memory_bytes is not None:
        raise UserError(f"memory_bytes={passes.memory_bytes}: passes under a limit are not modelled; `measured_spans`")
    workload, spans = passes.workload, measured_spans(passes, fresh=fresh)
    machine = this_machine(workload.dtype, workload.sparsity, fresh)
    tables = []
    for (way, mapping), rows in _by_way(spans):
        where = LayerMap(0, int(rows["dram_layers"].iloc[0]), int(rows["storage_layers"].iloc[0]))
        labels = {"profile": machine.id, **asdict(workload), "op": "pass", **asdict(way)}
        labels |= {"mapping": mapping, "dram_layers": where.dram, "storage_layers": where.storage}
        tables.append(_a_token(rows).assign(**labels))
        if way.method not in RIVALS:
            modelled = _predicted(machine, workload, way, where)
            tables.append(modelled.stages().assign(**labels))
    table = pd.concat(tables, ignore_index=True)
    mapped = table["mapping"] != "storage"
    compared = [beside_dense(table[~mapped])]
    if mapped.any():
        compared.append(beside_dense(table[mapped], mapping="published"))
    return beside_measured(pd.concat(compared, ignore_index=True))


def pair_ratios(passes: Passes, pairs: Pairs, fresh: bool = False) -> pd.DataFrame:
    """`pairs_table` of the passes that `pass_measurements` shows."""
    return pairs_table(measured_spans(passes, fresh=fresh), pairs)


def pairs_table(spans: pd.DataFrame, pairs: Pairs) -> pd.DataFrame:
    """How many times as fast ours was in the same turn: `ratio`, with its range (`summary`).

    `spans` are those of `pass_spans`. `pairs` are of (method, policy), ours and the other, with all layers on disk;
    pairs that are not among the spans are left out.

    `byte_limit`, for two ways of our own with one policy, is the bytes that the other reads for a token over the bytes
    that ours reads: what moves weights from the same disk with the same reader cannot gain more. It is NaN beside
    other software, which is slower for more reasons. `read_share_ours` and `read_share_other` are the bytes read in the
    window over those that its tokens need. `fault` says what is wrong with a measurement, or is empty: a ratio above
    `byte_limit` in every turn, or reads in the window that differ by more than one layer from what the tokens need.
    """
    on_disk, rows = spans[spans["mapping"] == "storage"], []
    turns = by_turn(on_disk, WAY)
    turns["read_share"] = turns["read_bytes"] / turns["stored_bytes"]
    counts = on_disk.groupby(WAY)[["storage_layers", "tokens"]].first()
    for ours, other in pairs:
        if not {ours, other} <= set(counts.index):
            continue
        over = {"ratio": dict(zip(WAY, other, strict=True))}
        ways = summary(turns, WAY, over=over).set_index(WAY).join(counts)
        mine, theirs = ways.loc[ours], ways.loc[other]
        comparable = {ours[0], other[0]} <= set(METHODS) and ours[1] == other[1]
        limit = theirs["stored_bytes"] / mine["stored_bytes"] if comparable else float("nan")
        row = {"ours": ", ".join(ours), "other": ", ".join(other)} | mine[
            ["ratio", "ratio_low", "ratio_high"]
        ].to_dict()
        row |= {"byte_limit": limit, "read_share_ours": mine["read_share"], "read_share_other": theirs["read_share"]}
        faults = [f"above the byte limit {limit:.2f}"] if row["ratio_low"] > limit else []
        faults += [
            f"{', '.join(name)} read {way['read_share']:.0%} of its bytes in the window"
            for name, way in ((ours, mine), (other, theirs))
            if abs(way["read_share"] - 1) > 1 / (way["storage_layers"] * way["tokens"])  # a layer
        ]
        rows.append(row | {"fault": "; ".join(faults)})
    return pd.DataFrame(rows)


def seconds_table(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each way measured with all layers on disk, the quickest first, from `pass_measurements`.

    Columns: seconds a token (median), seconds_low, seconds_high, bytes_a_token that were read, gb_s of the whole pass,
    mode.
    """
    chosen = (table["evidence"] == "measured") & (table["mapping"] == "storage") & (table["stage"] == "total")
    rows = table[chosen].set_index(["method", "policy"]).sort_values("median_s")
    shown = rows[["median_s", "seconds_low", "seconds_high", "nbytes", "gb_s", "mode"]]
    return shown.rename(columns={"median_s": "seconds", "nbytes": "bytes_a_token"})


def default_ways(methods: Sequence[str]) -> list[Placed]:
    """Every method by both policies from disk, Accelerate, and every method through the paper's maps, sequentially."""
    one_by_one = all_ways(device="cpu", methods=methods)
    ways = [(way, "storage") for way in all_ways(POLICIES, "cpu", methods)] + [RIVAL]
    ways += [(way, "published") for way in one_by_one]
    return ways + [(way, "refilled") for way in one_by_one if way.stored.format != "dense"]


def software_ways(methods: Sequence[str], rivals: Sequence[str] = PLAIN_TYPES) -> list[Placed]:
    """Every method, pipelined from disk, Accelerate, and llama.cpp's `rivals` where it can run (`llama_cpp.missing`).

    llama.cpp runs Llama decoders only.
    """
    ways = [(way, "storage") for way in all_ways(["pipelined"], "cpu", methods)] + [RIVAL]
    return ways + ([] if missing() else [(Way(name, device="cpu"), "storage") for name in rivals])


@measured
def measured_spans(passes: Passes) -> pd.DataFrame:
    """`pass_spans` of the passes, kept."""
    place = make_folder(paths.cache_dir())
    limit = {"memory_bytes": passes.memory_bytes}
    return pass_spans(passes.workload, passes.layers, passes.ways, passes.repetitions, place, **limit)


def _a_token(spans: pd.DataFrame) -> pd.DataFrame:
    """`median_stages` of windows over several tokens, for one of them."""
    shared = spans[["tokens", "stored_bytes"]].iloc[0]
    stages = median_stages(spans).assign(**shared)
    summed = ["seconds", "seconds_low", "median_s", "seconds_high", "nbytes"]
    return stages.assign(**{name: stages[name] / shared["tokens"] for name in summed})


def _by_way(spans: pd.DataFrame) -> Iterator[tuple[Placed, pd.DataFrame]]:
    for (method, policy, mapping), rows in spans.groupby(PLACED, sort=False):
        yield (Way(method, policy=policy, device="cpu"), mapping), rows


def _predicted(machine: Profile, workload: Workload, way: Way, where: LayerMap) -> Timeline:
    return predict(machine, [layer_of(workload, machine, way.method, tier) for tier in where.tiers], way)
