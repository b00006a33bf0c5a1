"""One token through a whole model on this machine: methods and policies side by side, and Accelerate's disk offload.

    pass_measurements("opt-1536", layers=10)      # beside pass_table(profile("endor-rtx4080"), ...)
    goal_ratios("opt-1536", layers=10)

The model is a twin with random weights (`toolkit.models.twins`); the device is the CPU; `toolkit.measure.turns` times.
Measurements are kept under `data/cache/measured/`, by machine, disk and code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import pandas as pd

from toolkit import paths
from toolkit.machines.machine import GB, Profile
from toolkit.measure.accelerate import RIVAL
from toolkit.measure.rates import this_machine
from toolkit.measure.repetitions import kept_spans, median_stages
from toolkit.measure.turns import PLACED, pass_spans, turn_seconds
from toolkit.models.workload import Workload
from toolkit.policies.methods import ACCELERATE, RIVALS
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import POLICIES, Placed, Way, all_ways
from toolkit.simulation.cost_model import predict
from toolkit.simulation.tables import layer_of
from toolkit.timeline.spans import Timeline
from toolkit.timeline.tables import beside_dense, beside_measured

PASS_METHODS = ("dense", "endor", "endor_packed")  # ZSTD is left to single operations: it would take most of the time
REPETITIONS = 5
# ours and other, each a method and policy with all layers on disk; how many times faster ours should be
GOALS = {
    (("endor", "pipelined"), ("dense", "pipelined")): 1.7,
    (("endor_packed", "pipelined"), ("dense", "pipelined")): 1.7,
    (("endor", "pipelined"), (ACCELERATE, "sequential")): 3.0,
}


def pass_measurements(
    model: str,
    layers: int,
    methods: Sequence[str] = PASS_METHODS,
    dtype: str = "float16",
    sparsity: float = 0.5,
    repetitions: int = REPETITIONS,
    fresh: bool = False,
) -> pd.DataFrame:
    """One pass as `pass_table` has it, measured, and but for Accelerate's modelled; columns more as `operations_here`.

    `mapping` is `storage` with every layer on disk, for which both policies and Accelerate are measured; `published`,
    the paper's share of layers in memory; or `refilled` (`LayerMap.refilled`). What neither reads, decodes nor
    multiplies weights is stage `other`, which the model leaves out. Raises `UserError` for unknown names, less than
    one repetition, so few layers that buffers keep them all, a disk too small, or a way whose logits are not
    those of the model in memory.
    """
    workload = Workload(model, dtype, sparsity)
    spans = _spans(workload, layers, methods, repetitions, fresh)
    machine = this_machine(dtype, sparsity, fresh)
    tables = []
    for (way, mapping), rows in _by_way(spans):
        where = LayerMap(0, int(rows["dram_layers"].iloc[0]), int(rows["storage_layers"].iloc[0]))
        labels = {"profile": machine.id, **asdict(workload), "op": "pass", **asdict(way)}
        labels |= {"mapping": mapping, "dram_layers": where.dram, "storage_layers": where.storage}
        tables.append(median_stages(rows).assign(**labels))
        if way.method not in RIVALS:
            modelled = _predicted(machine, workload, way, where)
            tables.append(modelled.stages().assign(**labels))
    table = pd.concat(tables, ignore_index=True)
    mapped = table["mapping"] != "storage"
    compared = [beside_dense(table[~mapped]), beside_dense(table[mapped], mapping="published")]
    return beside_measured(pd.concat(compared, ignore_index=True))


def goal_ratios(
    model: str,
    layers: int,
    methods: Sequence[str] = PASS_METHODS,
    dtype: str = "float16",
    sparsity: float = 0.5,
    repetitions: int = REPETITIONS,
    fresh: bool = False,
) -> pd.DataFrame:
    """The ratios of `GOALS` among the passes that `pass_measurements` shows, with the same arguments: `goals_table`."""
    return goals_table(_spans(Workload(model, dtype, sparsity), layers, methods, repetitions, fresh))


def goals_table(spans: pd.DataFrame) -> pd.DataFrame:
    """How many times faster ours was, turn by turn: median and quartiles, what was wanted, whether that was met.

    `spans` as `pass_spans` gives them; goals whose ways are not among them are left out.
    """
    turns = turn_seconds(spans)
    rows = []
    for (ours, other), wanted in GOALS.items():
        if {(*ours, "storage"), (*other, "storage")} <= set(turns):
            ratio = turns[*other, "storage"] / turns[*ours, "storage"]
            low, middle, high = ratio.quantile([0.25, 0.5, 0.75])
            names = {"ours": ", ".join(ours), "other": ", ".join(other)}
            rows.append(names | {"ratio": middle, "low": low, "high": high, "wanted": wanted, "met": middle >= wanted})
    return pd.DataFrame(rows)


def decoding_pays(table: pd.DataFrame, other: Profile) -> pd.DataFrame:
    """How quickly the CPU unpacks Endor, and how quickly it must for that to pay: a row this machine, a row the other.

    In dense GB a second: decode_gb_s alone; cpu_gb_s, decoding and what else the cores do with a weight, the product
    (of a machine with a GPU nothing); read_gb_s of the disk; pays_sequential_gb_s, where decoding takes as long as the
    shorter read saves; pays_pipelined_gb_s, where the cores take as long as the packed read and hide behind it. Then
    pays and hides, and `basis`, a key of `BASES`: where decode_gb_s comes from.
    `table` of `pass_measurements`, its sequential passes from disk; of the other machine what its profile says.
    """
    chosen = table[(table["method"] == "endor") & (table["policy"] == "sequential") & (table["mapping"] == "storage")]
    stages = chosen[chosen["evidence"] == "measured"].set_index("stage")
    dense_gb = stages["nbytes"]["decode"] / GB
    busy_s = stages["seconds"][["decode", "compute"]].sum()
    here = {"decode_gb_s": stages["gb_s"]["decode"], "cpu_gb_s": dense_gb / busy_s, "read_gb_s": stages["gb_s"]["read"]}
    decoded = other.dram.decode_gb_s["endor"]
    there = {"decode_gb_s": decoded, "cpu_gb_s": decoded, "read_gb_s": other.links.storage_to_dram_gb_s}
    found = pd.DataFrame([here, there], index=["this-machine", other.id])
    share = stages["nbytes"]["read"] / stages["nbytes"]["decode"]
    found["pays_sequential_gb_s"] = found["read_gb_s"] / (1 - share)
    found["pays_pipelined_gb_s"] = found["read_gb_s"] / share
    return found.assign(
        pays=found["decode_gb_s"] > found["pays_sequential_gb_s"],
        hides=found["cpu_gb_s"] >= found["pays_pipelined_gb_s"],
        basis=["measured", other.sources["dram.decode_gb_s.endor"].basis],
    )


def default_ways(methods: Sequence[str]) -> list[Placed]:
    """Every method by both policies from disk, Accelerate, and every method through the paper's maps, sequentially."""
    one_by_one = all_ways(device="cpu", methods=methods)
    found = [(way, "storage") for way in all_ways(POLICIES, "cpu", methods)] + [RIVAL]
    found += [(way, "published") for way in one_by_one]
    return found + [(way, "refilled") for way in one_by_one if way.stored.format != "dense"]


def _spans(workload: Workload, layers: int, methods: Sequence[str], repetitions: int, fresh: bool) -> pd.DataFrame:
    ways = default_ways(methods)
    named = [[asdict(way), mapping] for way, mapping in ways]
    key = asdict(workload) | {"layers": layers, "ways": named, "repetitions": repetitions}

    def measure() -> pd.DataFrame:
        paths.cache_dir().mkdir(parents=True, exist_ok=True)
        return pass_spans(workload, layers, ways, repetitions, paths.cache_dir())

    return kept_spans(key, ("toolkit.measure.turns",), measure, fresh)


def _by_way(spans: pd.DataFrame) -> Iterator[tuple[Placed, pd.DataFrame]]:
    for (method, policy, mapping), rows in spans.groupby(PLACED, sort=False):
        yield (Way(method, policy=policy, device="cpu"), mapping), rows


def _predicted(machine: Profile, workload: Workload, way: Way, where: LayerMap) -> Timeline:
    return predict(machine, [layer_of(workload, machine, way.method, tier) for tier in where.tiers], way)
