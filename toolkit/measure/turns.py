"""Ways of bringing one token through the same model on disk, taking turns, each checked and timed.

    ways = [(Way("dense", device="cpu"), "storage"), (Way("endor", policy="pipelined", device="cpu"), "storage")]
    spans = pass_spans(Workload("opt-1536"), 10, ways, 3, folder)
    turn_seconds(spans)

A slow spell of the disk hits one turn of each. In a turn the logits are checked against those of the model in memory,
and of ours the second token is timed, since a pipeline begins to read for it behind the first. It reads the disk again:
there are more layers than buffers, and where reads go through the page cache that is emptied in between.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.formats.packed import DTYPES
from toolkit.measure.accelerate import DiskOffloaded
from toolkit.measure.repetitions import SPAN, timeline_of
from toolkit.models import decoder_blocks
from toolkit.models.twins import twin_model
from toolkit.models.workload import Workload
from toolkit.offload.model import OffloadedModel
from toolkit.policies.methods import ACCELERATE, RIVALS
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import POLICIES, Placed, Way
from toolkit.storage.direct import drop_pages
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store
from toolkit.timeline.spans import Timeline

TOKEN = torch.tensor([[7]])
IN_MEMORY = 13 / 64  # of OPT-66B's layers, on GPU and CPU (ENDOR, section 3.3)
NEAR = 0.02  # of the largest logit: `endor_packed` adds in another order
PLACED = ["method", "policy", "mapping"]


def pass_spans(workload: Workload, layers: int, ways: Sequence[Placed], repetitions: int, folder: Path) -> pd.DataFrame:
    """The spans of every way's passes, timed in a folder whose disk they read; what is written there goes again.

    Columns: those of `PLACED`, dram_layers, storage_layers, repetition (from 1), mode ("direct" if the page cache
    was passed by) and those of `Span`, in seconds from the pass's start. Raises what `passes_here` does.
    """
    if repetitions < 1:
        raise UserError(f"repetitions={repetitions}: expected 1 or more")
    for way, mapping in ways:
        place_layers(way, mapping, layers)  # early: only `refilled` goes by bytes, which are known once they are packed
    with tempfile.TemporaryDirectory(prefix=".passes-", dir=folder) as place:
        turns = _prepared(workload, layers, ways, Path(place))
        return pd.concat(
            (rows for repetition in range(1, repetitions + 1) for rows in turns.each(repetition)), ignore_index=True
        )


def turn_seconds(spans: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each pass: a row a turn, a column a (method, policy, mapping)."""
    times = {key: timeline_of(rows).total_s for key, rows in spans.groupby(["repetition", *PLACED])}
    return pd.Series(times).unstack([1, 2, 3])


def layer_maps(layers: int, dense_bytes: int, packed_bytes: int) -> dict[str, LayerMap]:
    """Where layers live under each mapping, for layers of these bytes.

    OPT-66B has 13 of 64 layers on GPU and CPU (ENDOR, section 3.3); here, where the CPU computes, DRAM is the nearest
    tier and takes that share. `refilled` is what fits into the bytes of these once they are packed.
    """
    near = round(layers * IN_MEMORY)
    published = LayerMap(0, near, layers - near)
    return {
        "storage": LayerMap(0, 0, layers),
        "published": published,
        "refilled": published.refilled(dense_bytes, packed_bytes),
    }


def place_layers(way: Way, mapping: str, layers: int, dense_bytes: int = 1, packed_bytes: int = 1) -> LayerMap:
    """Where the layers of a way live, for layers of these bytes.

    Raises `UserError` for an unknown mapping, or if all layers in storage stay in its buffers: a second token would
    find them there and read nothing.
    """
    maps = layer_maps(layers, dense_bytes, packed_bytes)
    if mapping not in maps:
        raise unknown("mapping", mapping, maps)
    where = maps[mapping]
    slots = 0 if way.method in RIVALS else POLICIES[way.policy].slots
    if 0 < where.storage <= slots:
        raise UserError(
            f"{way.method}, {way.policy}, {mapping}: layers in storage: {where.storage} of {layers}; its buffers "
            f"keep {slots}, so that a second token reads nothing: expected none or more than {slots}; take more layers"
        )
    return where


@dataclass(frozen=True, eq=False)
class Turns:
    """What the ways run on: a packed model, the same under Accelerate, and the logits that each must give.

    `maps` says where the layers of each live.
    """

    store: Store
    rival: DiskOffloaded | None
    expected: Tensor
    maps: Mapping[Placed, LayerMap]

    def each(self, repetition: int) -> Iterator[pd.DataFrame]:
        """One pass of each, begun with the next one in each repetition (from 1)."""
        order = [*self.maps.items()]
        first = (repetition - 1) % len(order)
        for (way, mapping), where in order[first:] + order[:first]:
            mode, timeline = self.timed(way, where)
            labels = {
                "method": way.method,
                "policy": way.policy,
                "mapping": mapping,
                "dram_layers": where.dram,
                "storage_layers": where.storage,
            }
            yield timeline.table()[SPAN].assign(**labels, repetition=repetition, mode=mode)

    def timed(self, way: Way, where: LayerMap) -> tuple[str, Timeline]:
        """How the disk was read, and a token's timeline: of ours the second one's, of Accelerate a single one's."""
        if way.method == ACCELERATE:
            given, timeline = self.rival.timed(TOKEN, use_cache=False)
            self.check(way, given.logits)
            return "buffered", timeline
        # its checksums were compared when the store was written
        how = {"placement": where, "policy": way.policy, "verify": False}
        with OffloadedModel.open(self.store.folder, way.method, **how) as ours:
            self.check(way, _logits(ours.model))
            mode, recorder = ours.mode, ours.recorder
            if mode != "direct":
                _drop_pages(ours.store, way.stored.format)
            begun_s = recorder.now_s()
            logits = _logits(ours.model)
            ended_s = recorder.now_s()
        self.check(way, logits)
        return mode, recorder.timeline().window(begun_s, ended_s)  # once closed: every read has ended

    def check(self, way: Way, logits: Tensor) -> None:
        """Raise `UserError` unless they are the expected ones, to the bit but for products with packed weights."""
        close = torch.allclose(logits.float(), self.expected.float(), atol=NEAR * float(self.expected.abs().max()))
        if not (close if way.stored.used_packed else torch.equal(logits, self.expected)):
            raise UserError(f"{way.method}, {way.policy}, gives other logits than the model in memory: not timed")


def _prepared(workload: Workload, layers: int, ways: Sequence[Placed], folder: Path) -> Turns:
    model = twin_model(workload.model, layers, DTYPES[workload.dtype], workload.sparsity)
    expected = _logits(model)
    forms = dict.fromkeys(["dense", *sorted(way.stored.format for way, _ in ways)])
    pack_model(model, folder / "store", tuple(forms), workload.model)
    store = Store.open(folder / "store")
    store.verify()
    rival = None
    if any(way.method == ACCELERATE for way, _ in ways):  # what is in no layer stays in memory, as with ours
        rival = DiskOffloaded(model, folder / ACCELERATE, decoder_blocks(model))
    return Turns(store, rival, expected, {(way, mapping): _placed(store, way, mapping) for way, mapping in ways})


def _placed(store: Store, way: Way, mapping: str) -> LayerMap:
    dense, form = store.layers_of("dense"), way.stored.format
    return place_layers(way, mapping, len(dense), dense[0].nbytes, store.layer(0, form).nbytes)


def _drop_pages(store: Store, variant: str) -> None:
    for file in store.files(variant).values():
        drop_pages(file.path)


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKEN, use_cache=False).logits
