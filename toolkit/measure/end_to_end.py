"""One token through a whole model on this machine: methods and policies side by side, and Accelerate's disk offload.

    passes_here("opt-1536", layers=10)      # beside pass_table(profile("endor-rtx4080"), ...)
    goals_here("opt-1536", layers=10)

The model is a twin with random weights (`toolkit.models.twins`); the device is the CPU; `toolkit.measure.turns` times.
Measurements are kept under `data/cache/measured/`, by machine, disk and code.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import pandas as pd

from toolkit import paths
from toolkit.errors import unknown
from toolkit.machines.machine import GB, Profile
from toolkit.measure.accelerate import ACCELERATE
from toolkit.measure.repetitions import kept_spans, median_stages
from toolkit.measure.this_machine import machine_here
from toolkit.measure.turns import CONTESTANT, Contestant, pass_spans, turn_seconds
from toolkit.papers.endor import Workload
from toolkit.policies.methods import METHODS
from toolkit.policies.placement import LayerMap
from toolkit.simulation.cost_model import POLICIES, Plan, predict
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


def passes_here(
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
    one repetition, so few layers that buffers keep them all, a disk too small, or a contestant whose logits are not
    those of the model in memory.
    """
    workload = Workload(model, dtype, sparsity)
    spans = _spans(workload, layers, methods, repetitions, fresh)
    machine = machine_here(dtype, sparsity, fresh)
    tables = []
    for contestant, rows in _by_contestant(spans):
        where = LayerMap(0, int(rows["dram_layers"].iloc[0]), int(rows["storage_layers"].iloc[0]))
        labels = {"profile": machine.id, **asdict(workload), "op": "pass", **_plan_labels(contestant)}
        labels |= {"mapping": contestant.mapping, "dram_layers": where.dram, "storage_layers": where.storage}
        tables.append(median_stages(rows).assign(**labels))
        if contestant.method != ACCELERATE:
            modelled = _predicted(machine, workload, contestant, where)
            tables.append(modelled.stages().assign(**labels))
    table = pd.concat(tables, ignore_index=True)
    mapped = table["mapping"] != "storage"
    compared = [beside_dense(table[~mapped]), beside_dense(table[mapped], mapping="published")]
    return beside_measured(pd.concat(compared, ignore_index=True))


def goals_here(
    model: str,
    layers: int,
    methods: Sequence[str] = PASS_METHODS,
    dtype: str = "float16",
    sparsity: float = 0.5,
    repetitions: int = REPETITIONS,
    fresh: bool = False,
) -> pd.DataFrame:
    """The ratios of `GOALS` among the passes that `passes_here` shows, with the same arguments: `goals_table`."""
    return goals_table(_spans(Workload(model, dtype, sparsity), layers, methods, repetitions, fresh))


def goals_table(spans: pd.DataFrame) -> pd.DataFrame:
    """How many times faster ours was, turn by turn: median and quartiles, what was wanted, whether that was met.

    `spans` as `pass_spans` gives them; goals whose contestants are not among them are left out.
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
    `table` of `passes_here`, its sequential passes from disk; of the other machine what its profile says.
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


def default_contestants(methods: Sequence[str]) -> list[Contestant]:
    """Every method by both policies from disk, Accelerate, and every method through the paper's maps, sequentially."""
    for name in methods:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    found = [Contestant(method, policy) for policy in POLICIES for method in methods]
    found.append(Contestant(ACCELERATE))
    found += [Contestant(method, mapping="published") for method in methods]
    return found + [Contestant(method, mapping="refilled") for method in methods if METHODS[method].format != "dense"]


def _spans(workload: Workload, layers: int, methods: Sequence[str], repetitions: int, fresh: bool) -> pd.DataFrame:
    contestants = default_contestants(methods)
    named = [asdict(contestant) for contestant in contestants]
    key = asdict(workload) | {"layers": layers, "contestants": named, "repetitions": repetitions}

    def measure() -> pd.DataFrame:
        paths.cache_dir().mkdir(parents=True, exist_ok=True)
        return pass_spans(workload, layers, contestants, repetitions, paths.cache_dir())

    return kept_spans(key, ("toolkit.measure.turns",), measure, fresh)


def _by_contestant(spans: pd.DataFrame) -> Iterator[tuple[Contestant, pd.DataFrame]]:
    for name, rows in spans.groupby(CONTESTANT, sort=False):
        yield Contestant(*name), rows


def _plan_labels(contestant: Contestant) -> Mapping[str, object]:
    """Those of the cost model's plan; Accelerate's are those of dense weights, but for the method."""
    method = contestant.method if contestant.method in METHODS else "dense"
    return asdict(Plan(method, "host", contestant.policy, "cpu")) | {"method": contestant.method}


def _predicted(machine: Profile, workload: Workload, contestant: Contestant, where: LayerMap) -> Timeline:
    layers = [workload.layer(machine, contestant.method, tier) for tier in where.tiers]
    return predict(machine, layers, Plan(contestant.method, "host", contestant.policy, "cpu"))
