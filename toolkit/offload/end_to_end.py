"""One token through a whole model on this machine: methods and policies side by side, and Accelerate's disk offload.

    passes_here("opt-1536", layers=10)      # beside pass_table(profile("endor-rtx4080"), ...)
    goals_here("opt-1536", layers=10)

The model is a twin with random weights (`toolkit.offload.twins`); the device is the CPU. Contestants take turns, so a
slow spell of the disk hits one turn of each. In a turn the first token's logits are checked against the model in
memory, and the second token is timed: what a pipeline reads ahead at its end is then read behind the end of the one
before it. Measurements are kept under `data/cache/measured/`, by machine, disk and code.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from toolkit import paths, sources
from toolkit.cache import cached_table
from toolkit.errors import UserError, unknown
from toolkit.formats.packed import DTYPES
from toolkit.offload.baselines import ACCELERATE, DiskOffloaded
from toolkit.offload.comparison import beside_dense, over
from toolkit.offload.here import machine_here
from toolkit.offload.methods import METHODS
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.offload.repetitions import SPAN, median_stages, timeline_of
from toolkit.offload.timeline import Timeline
from toolkit.offload.twins import twin_model
from toolkit.simulation.endor import MAPS, Workload
from toolkit.simulation.machine import Profile
from toolkit.simulation.probe import describe
from toolkit.simulation.transfer import POLICIES, Plan, predict
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store

PASS_METHODS = ("dense", "endor", "endor_packed")  # ZSTD is left to single operations: it would take most of the time
TOKEN = torch.tensor([[7]])
NEAR = 0.02  # of the largest logit: `endor_packed` adds in another order
CONTESTANT = ["method", "policy", "mapping"]
# ours and other, each a method and policy with all layers on disk; how many times faster ours should be
GOALS = {
    (("endor", "pipelined"), ("dense", "pipelined")): 1.7,
    (("endor_packed", "pipelined"), ("dense", "pipelined")): 1.7,
    (("endor", "pipelined"), (ACCELERATE, "sequential")): 3.0,
}


@dataclass(frozen=True)
class Contestant:
    """One way through the model. Raises `UserError` for an unknown method or policy."""

    method: str
    policy: str = "sequential"
    mapping: str = "storage"

    def __post_init__(self):
        """Refuse unknown names."""
        for kind, known in {"method": [*METHODS, ACCELERATE], "policy": POLICIES}.items():
            if getattr(self, kind) not in known:
                raise unknown(kind, getattr(self, kind), known)


def passes_here(
    model: str,
    layers: int,
    methods: Sequence[str] = PASS_METHODS,
    dtype: str = "float16",
    sparsity: float = 0.5,
    repetitions: int = 5,
    fresh: bool = False,
) -> pd.DataFrame:
    """One pass as `pass_table` has it, measured, and but for Accelerate's modelled; columns more as `operations_here`.

    `mapping` is `storage` with every layer on disk, for which both policies and Accelerate are measured; `published`,
    the paper's share of layers in memory; or `refilled` (`LayerMap.refilled`). What neither reads, decodes nor
    multiplies weights is stage `other`, which the model leaves out. Raises `UserError` for unknown names, less than
    one layer or repetition, a disk too small, or a contestant whose logits are not those of the model in memory.
    """
    workload = Workload(model, dtype, sparsity)
    spans = _spans(workload, layers, methods, repetitions, fresh)
    machine = machine_here(dtype, sparsity, fresh)
    tables = []
    for contestant, rows in _by_contestant(spans):
        where = LayerMap(0, int(rows["dram_layers"].iloc[0]), int(rows["storage_layers"].iloc[0]))
        labels = {"profile": machine.id, **asdict(workload), "op": "pass", **_plan_labels(contestant)}
        labels |= {"mapping": contestant.mapping, "dram_layers": where.dram, "storage_layers": where.storage}
        tables.append(median_stages(rows).assign(**labels, mode=rows["mode"].iloc[0]))
        if contestant.method != ACCELERATE:
            modelled = _predicted(machine, workload, contestant, where)
            tables.append(modelled.stages().assign(**labels))
    table = pd.concat(tables, ignore_index=True)
    mapped = table["mapping"] != "storage"
    compared = [beside_dense(table[~mapped]), beside_dense(table[mapped], mapping="published")]
    table = pd.concat(compared, ignore_index=True)
    ratio = over(table, "seconds", evidence="measured")
    return table.assign(modelled_over_measured=ratio.where(table["evidence"] == "modelled"))


def goals_here(model: str, layers: int, methods: Sequence[str] = PASS_METHODS, **how: object) -> pd.DataFrame:
    """The ratios of `GOALS` among the passes that `passes_here` shows, with the same arguments: `goals_table`."""
    how = {"dtype": "float16", "sparsity": 0.5, "repetitions": 5, "fresh": False} | how
    workload = Workload(model, how["dtype"], how["sparsity"])
    return goals_table(_spans(workload, layers, methods, how["repetitions"], how["fresh"]))


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


def turn_seconds(spans: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each pass: a row a turn, a column a (method, policy, mapping)."""
    times = {key: timeline_of(rows).total_s for key, rows in spans.groupby(["repetition", *CONTESTANT])}
    return pd.Series(times).unstack([1, 2, 3])


def pass_spans(
    workload: Workload, layers: int, contestants: Sequence[Contestant], repetitions: int, folder: Path
) -> pd.DataFrame:
    """The spans of every contestant's passes, timed in a folder whose disk they read; what is written there goes again.

    Columns: those of `CONTESTANT`, dram_layers, storage_layers, repetition (from 1), mode ("direct" if the page cache
    was passed by) and those of `Span`, in seconds from the pass's start. Raises what `passes_here` does.
    """
    if repetitions < 1:
        raise UserError(f"repetitions={repetitions}: expected 1 or more")
    with tempfile.TemporaryDirectory(prefix=".passes-", dir=folder) as place:
        race = _race(workload, layers, contestants, Path(place))
        return pd.concat(
            (rows for repetition in range(1, repetitions + 1) for rows in race.turns(repetition)), ignore_index=True
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


def layer_maps(layers: int, dense_bytes: int, packed_bytes: int) -> dict[str, LayerMap]:
    """Where layers live under each mapping, for layers of these bytes.

    OPT-66B has 13 of 64 layers on GPU and CPU (ENDOR, section 3.3); here, where the CPU computes, DRAM is the nearest
    tier and takes that share. `refilled` is what fits into the bytes of these once they are packed.
    """
    theirs = MAPS["opt-66b"]["published"]
    near = round(layers * (theirs.device + theirs.dram) / len(theirs.tiers))
    published = LayerMap(0, near, layers - near)
    return {
        "storage": LayerMap(0, 0, layers),
        "published": published,
        "refilled": published.refilled(dense_bytes, packed_bytes),
    }


@dataclass(frozen=True, eq=False)
class Race:
    """What contestants run on: a packed model, the same under Accelerate, and the logits that each must give."""

    store: Store
    rival: DiskOffloaded | None
    expected: Tensor
    contestants: tuple[Contestant, ...]

    def turns(self, repetition: int) -> Iterator[pd.DataFrame]:
        """One pass of each, begun with another one in each repetition."""
        first = repetition % len(self.contestants)
        for contestant in self.contestants[first:] + self.contestants[:first]:
            where = self.where(contestant)
            mode, timeline = self.timed(contestant, where)
            labels = asdict(contestant) | {"dram_layers": where.dram, "storage_layers": where.storage}
            yield timeline.table()[SPAN].assign(**labels, repetition=repetition, mode=mode)

    def where(self, contestant: Contestant) -> LayerMap:
        """The map of its layers. Raises `UserError` for an unknown mapping."""
        form = "dense" if contestant.method == ACCELERATE else METHODS[contestant.method].format
        sizes = [self.store.layers_of(name) for name in ("dense", form)]
        maps = layer_maps(len(sizes[0]), *(layers[0].nbytes for layers in sizes))
        if contestant.mapping not in maps:
            raise unknown("mapping", contestant.mapping, maps)
        return maps[contestant.mapping]

    def timed(self, contestant: Contestant, where: LayerMap) -> tuple[str, Timeline]:
        """The reader's mode, and the second token's timeline; the first one's logits are checked."""
        if contestant.method == ACCELERATE:
            return "buffered", self._accelerate(contestant)
        # its checksums were compared when the store was written
        how = {"placement": where, "policy": contestant.policy, "verify": False}
        with OffloadedModel.open(self.store.folder, contestant.method, **how) as ours:
            self.check(contestant, _logits(ours.model))
            mode, recorder = ours.streamer.reader.mode, ours.recorder
            begun_s = recorder.now_s()
            _logits(ours.model)
            ended_s = recorder.now_s()
        return mode, recorder.timeline().window(begun_s, ended_s)  # once closed: every read has ended

    def check(self, contestant: Contestant, logits: Tensor) -> None:
        """Raise `UserError` unless they are the expected ones, to the bit but for products with packed weights."""
        close = torch.allclose(logits.float(), self.expected.float(), atol=NEAR * float(self.expected.abs().max()))
        packed = contestant.method in METHODS and _used_packed(contestant.method)
        if not (close if packed else torch.equal(logits, self.expected)):
            raise UserError(
                f"{contestant.method}, {contestant.policy}, gives other logits than the model in memory: not timed"
            )

    def _accelerate(self, contestant: Contestant) -> Timeline:
        self.rival.drop_pages()
        self.check(contestant, _logits(self.rival.module))
        self.rival.drop_pages()
        recorder = self.rival.recorder
        begun_s = recorder.now_s()
        _logits(self.rival.module)
        return recorder.timeline().window(begun_s, recorder.now_s())


def _race(workload: Workload, layers: int, contestants: Sequence[Contestant], folder: Path) -> Race:
    model = twin_model(workload.model, layers, DTYPES[workload.dtype], workload.sparsity)
    expected = _logits(model)
    methods = {contestant.method for contestant in contestants}
    forms = dict.fromkeys(["dense", *(METHODS[name].format for name in sorted(methods - {ACCELERATE}))])
    pack_model(model, folder / "store", tuple(forms), workload.model)
    store = Store.open(folder / "store")
    store.verify()
    rival = DiskOffloaded(model, folder / ACCELERATE) if ACCELERATE in methods else None
    return Race(store, rival, expected, tuple(contestants))


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKEN, use_cache=False).logits


def _used_packed(method: str) -> bool:
    return METHODS[method].decoded_in is None and METHODS[method].format != "dense"


def _spans(
    workload: Workload, layers: int, methods: Sequence[str], repetitions: int, fresh: bool
) -> pd.DataFrame:
    contestants = default_contestants(methods)
    key = asdict(workload) | {"layers": layers, "methods": list(methods), "repetitions": repetitions}

    def measure() -> pd.DataFrame:
        paths.cache_dir().mkdir(parents=True, exist_ok=True)
        return pass_spans(workload, layers, contestants, repetitions, paths.cache_dir())

    key |= {"machine": describe(), "threads": torch.get_num_threads()}
    return cached_table("measured", key, sources.dependencies("toolkit.offload.end_to_end"), measure, fresh)


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
