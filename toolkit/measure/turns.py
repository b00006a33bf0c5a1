"""Methods and policies that bring consecutive tokens through the same model on disk: each is timed and checked in turn.

    ways = [(Way("dense", device="cpu"), "storage"), (Way("endor", policy="pipelined", device="cpu"), "storage")]
    spans = pass_spans(Workload("opt-1536"), 10, ways, 3, folder)
    turn_seconds(spans)      # seconds a token
    turn_bytes(spans)        # bytes that were read for a token

A turn is one window over `TOKENS` consecutive tokens. A pipeline reads for a token while it computes the one before, so
a window over one token would leave a part of its reads out. A window over several tokens, after one that is not timed,
has as many reads as its tokens need; `read_shares` shows it. Logits are compared with those of the model in memory
after the window. Every token reads the disk: there are more layers than buffers, and where reads go through the page
cache, the files' pages are dropped before each token. Turns alternate, so that a slow spell of the disk hits all.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.files import scratch_folder
from toolkit.formats.packed import DTYPES
from toolkit.measure.accelerate import DiskOffloaded
from toolkit.measure.llama_cpp import MODE, LlamaCpp
from toolkit.measure.repetitions import SPAN, timeline_of
from toolkit.models import decoder_blocks
from toolkit.models.twins import twin_model
from toolkit.models.workload import Workload
from toolkit.offload.model import OffloadedModel
from toolkit.policies.methods import ACCELERATE, LLAMA_CPP, RIVALS
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import POLICIES, Placed, Way
from toolkit.storage.direct import drop_pages
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store
from toolkit.timeline.spans import Timeline

TOKEN = torch.tensor([[7]])
TOKENS = 4  # in a turn's window
IN_MEMORY = 13 / 64  # of OPT-66B's layers, on GPU and CPU (ENDOR, section 3.3)
NEAR = 0.02  # of the largest logit: `endor_packed` adds in another order
PLACED = ["method", "policy", "mapping"]


def pass_spans(
    workload: Workload, layers: int, ways: Sequence[Placed], repetitions: int, folder: Path, tokens: int = TOKENS
) -> pd.DataFrame:
    """The spans of every way's turns, timed in a folder whose disk they read. What is written there is removed again.

    Columns: those of `PLACED`, dram_layers, storage_layers, repetition (from 1), tokens (in the window), stored_bytes
    (that one token must read), mode ("direct" if reads bypass the page cache) and those of `Span`, in seconds from the
    window's start. Raises `UserError` as `pass_measurements` does.
    """
    if min(repetitions, tokens) < 1:
        raise UserError(f"repetitions={repetitions}, tokens={tokens}: expected 1 or more of each")
    for way, mapping in ways:
        place_layers(way, mapping, layers)  # early; `refilled` is placed again once bytes are known
    with (
        scratch_folder(folder) as place,
        prepared(workload, layers, ways, place, tokens) as turns,
    ):
        return pd.concat(
            (rows for repetition in range(1, repetitions + 1) for rows in turns.each(repetition)), ignore_index=True
        )


def turn_seconds(spans: pd.DataFrame) -> pd.DataFrame:
    """Seconds a token: a row a turn, a column a (method, policy, mapping)."""
    return _by_turn(spans, lambda rows: timeline_of(rows).total_s / rows["tokens"].iloc[0])


def turn_bytes(spans: pd.DataFrame) -> pd.DataFrame:
    """Bytes read a token, as `turn_seconds`. A read that the window cuts counts in proportion."""
    return _by_turn(spans, lambda rows: rows.loc[rows["stage"] == "read", "nbytes"].sum() / rows["tokens"].iloc[0])


def read_shares(spans: pd.DataFrame) -> pd.DataFrame:
    """Bytes read a token over the bytes that it must read, as `turn_bytes`; NaN where all layers stay in memory."""
    stored = _by_turn(spans, lambda rows: rows["stored_bytes"].iloc[0])
    return turn_bytes(spans) / stored.where(stored > 0)


def layer_maps(layers: int, dense_bytes: int, packed_bytes: int) -> dict[str, LayerMap]:
    """Where layers live under each mapping, for layers of these bytes.

    OPT-66B has 13 of 64 layers on GPU and CPU (ENDOR, section 3.3). Our measurements compute on the CPU, so DRAM is
    the nearest tier and takes that share. `refilled` is what fits into the bytes of these once they are packed.
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

    Raises `UserError` for an unknown mapping, or if buffers keep all layers in storage: a second token would find them
    there and read nothing.
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


@dataclass(frozen=True)
class TimedWindow:
    """One window: how the disk was read, what happened, and the bytes that one token must read."""

    mode: str
    timeline: Timeline
    stored_bytes: int


@dataclass(frozen=True, eq=False)
class Turns:
    """The packed model, the same model in other software, the logits that all must give, and where layers live.

    `tokens` go through the model in each window.
    """

    store: Store
    accelerate: DiskOffloaded | None
    llama_cpp: Mapping[str, LlamaCpp]
    expected: Tensor
    maps: Mapping[Placed, LayerMap]
    tokens: int = TOKENS

    def each(self, repetition: int) -> Iterator[pd.DataFrame]:
        """One turn of each way. Each repetition (from 1) begins with the next way."""
        order = [*self.maps.items()]
        first = (repetition - 1) % len(order)
        for (way, mapping), where in order[first:] + order[:first]:
            turn = self.timed(way, where)
            labels = {
                "method": way.method,
                "policy": way.policy,
                "mapping": mapping,
                "dram_layers": where.dram,
                "storage_layers": where.storage,
                "repetition": repetition,
                "tokens": self.tokens,
                "stored_bytes": turn.stored_bytes,
                "mode": turn.mode,
            }
            yield turn.timeline.table()[SPAN].assign(**labels)

    def timed(self, way: Way, where: LayerMap) -> TimedWindow:
        """A window over `tokens` tokens. Raises `UserError` if its logits are not those of the model in memory."""
        if way.method == ACCELERATE:
            return self._accelerate(way)
        if way.method in LLAMA_CPP:
            runtime = self.llama_cpp[way.method]
            return TimedWindow(
                MODE, one_after_another([runtime.timed() for _ in range(self.tokens)]), runtime.stored_bytes
            )
        return self._ours(way, where)

    def _ours(self, way: Way, where: LayerMap) -> TimedWindow:
        with open_model(self.store, way, where) as ours:
            found = [_logits(ours.model)]  # fills the buffers
            begun_s = ours.recorder.now_s()
            for _ in range(self.tokens):
                if ours.mode != "direct":
                    drop_store_pages(ours.store, way.stored.format)
                found.append(_logits(ours.model))
            ended_s = ours.recorder.now_s()
        for logits in found:
            self.check(way, logits)
        layers = zip(self.store.layers_of(way.stored.format), where.tiers, strict=True)
        stored_bytes = sum(layer.nbytes for layer, tier in layers if tier == "storage")
        # the model is closed, so every read has ended and is recorded
        return TimedWindow(ours.mode, ours.recorder.timeline().window(begun_s, ended_s), stored_bytes)

    def _accelerate(self, way: Way) -> TimedWindow:
        passes = [self.accelerate.timed(TOKEN, use_cache=False) for _ in range(self.tokens)]
        for given, _ in passes:
            self.check(way, given.logits)
        timeline = one_after_another([timeline for _, timeline in passes])
        return TimedWindow(MODE, timeline, self.accelerate.stored_bytes)

    def check(self, way: Way, logits: Tensor, expected: Tensor | None = None) -> None:
        """Raise `UserError` unless all bits are as expected, or for products with packed weights nearly so."""
        expected = self.expected if expected is None else expected
        close = torch.allclose(logits.float(), expected.float(), atol=NEAR * float(expected.abs().max()))
        if not (close if way.stored.used_packed else torch.equal(logits, expected)):
            raise UserError(f"{way.method}, {way.policy}, gives other logits than the model in memory: not timed")


def open_model(store: Store, way: Way, where: LayerMap) -> OffloadedModel:
    """The model of a verified store, to be run in this way. Raises what `OffloadedModel.open` does."""
    return OffloadedModel.open(store.folder, way.method, placement=where, policy=way.policy, verify=False)


def drop_store_pages(store: Store, variant: str) -> None:
    """Remove the files of a variant from the page cache."""
    for file in store.files(variant).values():
        drop_pages(file.path)


def one_after_another(timelines: Sequence[Timeline]) -> Timeline:
    """Windows as one, without what lay between them: each begins where the one before it ends."""
    spans, ended_s = [], 0.0
    for timeline in timelines:
        spans += [replace(s, start_s=s.start_s + ended_s, end_s=s.end_s + ended_s) for s in timeline.spans]
        ended_s += timeline.total_s
    return Timeline(tuple(spans), "measured")


@contextlib.contextmanager
def prepared(
    workload: Workload,
    layers: int,
    ways: Sequence[Placed],
    folder: Path,
    tokens: int = TOKENS,
    look: Callable[[nn.Module], None] = lambda model: None,
) -> Iterator[Turns]:
    """What the ways need, written to an empty folder. `look` gets the model in memory before Accelerate takes it away.

    Raises `UserError` for an unknown model, fewer than one layer, or a disk that is too small.
    """
    model = twin_model(workload.model, layers, DTYPES[workload.dtype], workload.sparsity)
    expected = _logits(model)
    look(model)
    forms = dict.fromkeys(["dense", *sorted(way.stored.format for way, _ in ways if way.method not in RIVALS)])
    pack_model(model, folder / "store", tuple(forms), workload.model)
    store = Store.open(folder / "store")
    store.verify()
    methods = {way.method for way, _ in ways}
    with contextlib.ExitStack() as stack:
        llama_cpp = {name: stack.enter_context(LlamaCpp(model, name, folder)) for name in LLAMA_CPP if name in methods}
        accelerate = None
        if ACCELERATE in methods:  # embeddings, norms and head stay in memory, as with our runtime
            accelerate = DiskOffloaded(model, folder / ACCELERATE, decoder_blocks(model))
        maps = {(way, mapping): _placed(store, way, mapping) for way, mapping in ways}
        yield Turns(store, accelerate, llama_cpp, expected, maps, tokens)


def _placed(store: Store, way: Way, mapping: str) -> LayerMap:
    dense, form = store.layers_of("dense"), "dense" if way.method in RIVALS else way.stored.format
    return place_layers(way, mapping, len(dense), dense[0].nbytes, store.layer(0, form).nbytes)


def _by_turn(spans: pd.DataFrame, value: Callable[[pd.DataFrame], float]) -> pd.DataFrame:
    found = {key: value(rows) for key, rows in spans.groupby(["repetition", *PLACED])}
    return pd.Series(found).rename_axis(["repetition", *PLACED]).unstack(PLACED)


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKEN, use_cache=False).logits
