"""Contestants that bring one token through the same model on disk, taking turns, each checked and timed.

    spans = pass_spans(Workload("opt-1536"), 10, [Contestant("dense"), Contestant("endor", "pipelined")], 3, folder)
    turn_seconds(spans)

A slow spell of the disk hits one turn of each. In a turn the logits are checked against those of the model in memory,
and of ours the second token is timed, since a pipeline begins to read for it behind the first. It reads the disk again:
there are more layers than buffers, and where reads go through the page cache that is emptied in between.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.formats.packed import DTYPES
from toolkit.measure.accelerate import ACCELERATE, DiskOffloaded
from toolkit.measure.repetitions import SPAN, timeline_of
from toolkit.models import decoder_blocks
from toolkit.models.twins import twin_model
from toolkit.offload.model import OffloadedModel
from toolkit.offload.ring import SLOTS
from toolkit.papers.endor import MAPS, Workload
from toolkit.policies.methods import METHODS
from toolkit.policies.placement import LayerMap
from toolkit.simulation.cost_model import POLICIES
from toolkit.storage.direct import drop_pages
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store
from toolkit.timeline.spans import Timeline

TOKEN = torch.tensor([[7]])
NEAR = 0.02  # of the largest logit: `endor_packed` adds in another order
CONTESTANT = ["method", "policy", "mapping"]


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


def pass_spans(
    workload: Workload, layers: int, contestants: Sequence[Contestant], repetitions: int, folder: Path
) -> pd.DataFrame:
    """The spans of every contestant's passes, timed in a folder whose disk they read; what is written there goes again.

    Columns: those of `CONTESTANT`, dram_layers, storage_layers, repetition (from 1), mode ("direct" if the page cache
    was passed by) and those of `Span`, in seconds from the pass's start. Raises what `passes_here` does.
    """
    if repetitions < 1:
        raise UserError(f"repetitions={repetitions}: expected 1 or more")
    for contestant in contestants:
        place_layers(contestant, layers)  # early: only `refilled` goes by bytes, which are known once they are packed
    with tempfile.TemporaryDirectory(prefix=".passes-", dir=folder) as place:
        race = _race(workload, layers, contestants, Path(place))
        return pd.concat(
            (rows for repetition in range(1, repetitions + 1) for rows in race.turns(repetition)), ignore_index=True
        )


def turn_seconds(spans: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each pass: a row a turn, a column a (method, policy, mapping)."""
    times = {key: timeline_of(rows).total_s for key, rows in spans.groupby(["repetition", *CONTESTANT])}
    return pd.Series(times).unstack([1, 2, 3])


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


def place_layers(contestant: Contestant, layers: int, dense_bytes: int = 1, packed_bytes: int = 1) -> LayerMap:
    """Where a contestant's layers live, for layers of these bytes.

    Raises `UserError` for an unknown mapping, or if all layers in storage stay in its buffers: a second token would
    find them there and read nothing.
    """
    maps = layer_maps(layers, dense_bytes, packed_bytes)
    if contestant.mapping not in maps:
        raise unknown("mapping", contestant.mapping, maps)
    where = maps[contestant.mapping]
    slots = SLOTS[contestant.policy] if contestant.method != ACCELERATE else 0
    if 0 < where.storage <= slots:
        raise UserError(
            f"{', '.join(asdict(contestant).values())}: layers in storage: {where.storage} of {layers}; its buffers "
            f"keep {slots}, so that a second token reads nothing: expected none or more than {slots}; take more layers"
        )
    return where


@dataclass(frozen=True, eq=False)
class Race:
    """What contestants run on: a packed model, the same under Accelerate, and the logits that each must give.

    `contestants` says where the layers of each live.
    """

    store: Store
    rival: DiskOffloaded | None
    expected: Tensor
    contestants: Mapping[Contestant, LayerMap]

    def turns(self, repetition: int) -> Iterator[pd.DataFrame]:
        """One pass of each, begun with the next one in each repetition (from 1)."""
        order = [*self.contestants.items()]
        first = (repetition - 1) % len(order)
        for contestant, where in order[first:] + order[:first]:
            mode, timeline = self.timed(contestant, where)
            labels = asdict(contestant) | {"dram_layers": where.dram, "storage_layers": where.storage}
            yield timeline.table()[SPAN].assign(**labels, repetition=repetition, mode=mode)

    def timed(self, contestant: Contestant, where: LayerMap) -> tuple[str, Timeline]:
        """How the disk was read, and a token's timeline: of ours the second one's, of Accelerate a single one's."""
        if contestant.method == ACCELERATE:
            given, timeline = self.rival.timed(TOKEN, use_cache=False)
            self.check(contestant, given.logits)
            return "buffered", timeline
        # its checksums were compared when the store was written
        how = {"placement": where, "policy": contestant.policy, "verify": False}
        with OffloadedModel.open(self.store.folder, contestant.method, **how) as ours:
            self.check(contestant, _logits(ours.model))
            mode, recorder = ours.mode, ours.recorder
            if mode != "direct":
                _drop_pages(ours.store, METHODS[contestant.method].format)
            begun_s = recorder.now_s()
            logits = _logits(ours.model)
            ended_s = recorder.now_s()
        self.check(contestant, logits)
        return mode, recorder.timeline().window(begun_s, ended_s)  # once closed: every read has ended

    def check(self, contestant: Contestant, logits: Tensor) -> None:
        """Raise `UserError` unless they are the expected ones, to the bit but for products with packed weights."""
        close = torch.allclose(logits.float(), self.expected.float(), atol=NEAR * float(self.expected.abs().max()))
        packed = contestant.method in METHODS and _used_packed(contestant.method)
        if not (close if packed else torch.equal(logits, self.expected)):
            raise UserError(
                f"{contestant.method}, {contestant.policy}, gives other logits than the model in memory: not timed"
            )


def _race(workload: Workload, layers: int, contestants: Sequence[Contestant], folder: Path) -> Race:
    model = twin_model(workload.model, layers, DTYPES[workload.dtype], workload.sparsity)
    expected = _logits(model)
    methods = {contestant.method for contestant in contestants}
    forms = dict.fromkeys(["dense", *map(_form, sorted(methods))])
    pack_model(model, folder / "store", tuple(forms), workload.model)
    store = Store.open(folder / "store")
    store.verify()
    rival = None
    if ACCELERATE in methods:  # what is in no layer stays in memory, as with ours
        rival = DiskOffloaded(model, folder / ACCELERATE, decoder_blocks(model))
    return Race(store, rival, expected, {contestant: _placed(store, contestant) for contestant in contestants})


def _placed(store: Store, contestant: Contestant) -> LayerMap:
    dense, form = store.layers_of("dense"), _form(contestant.method)
    return place_layers(contestant, len(dense), dense[0].nbytes, store.layer(0, form).nbytes)


def _form(method: str) -> str:
    return "dense" if method == ACCELERATE else METHODS[method].format


def _drop_pages(store: Store, variant: str) -> None:
    for file in store.files(variant).values():
        drop_pages(file.path)


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKEN, use_cache=False).logits


def _used_packed(method: str) -> bool:
    return METHODS[method].decoded_in is None and METHODS[method].format != "dense"
