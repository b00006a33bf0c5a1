"""Decoding one token after another with a shape-only twin: SpQR beside fewer bits, pruned weights and llama.cpp.

    twin = ModelTwin("tinyllama-1.1b", layers=22)
    twin_measurements(twin, ["dense", "spqr"], ["llama.cpp Q3_K"], places=["dram", "storage"])

All weights are random, so only time is measured. In `dram` all layers stay in memory, and llama.cpp has loaded its file
in the order that its products like best. In `storage` every layer is read for each token, the next one while this one
is used, and llama.cpp maps its file, whose layers' pages are dropped before each token. The head stays in memory.
"""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from toolkit import paths
from toolkit.errors import UserError, unknown
from toolkit.files import make_folder, scratch_folder
from toolkit.formats import QUANTISED, Packed, encode
from toolkit.formats.scaled import Scaled
from toolkit.formats.twins import random_spqr
from toolkit.measure.contestant import Reference
from toolkit.measure.decoding import Text
from toolkit.measure.llama_cpp import LlamaCpp, missing
from toolkit.measure.streamed import StreamedModel
from toolkit.measure.summary import by_turn
from toolkit.measure.turns import measured, take_turns
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.twins import twin_model
from toolkit.policies.methods import LLAMA_CPP
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store


@dataclass(frozen=True)
class Stored:
    """Which store and variant a way of ours reads, and the method that runs it."""

    store: str
    variant: str
    method: str


WAYS = {
    "dense": Stored("plain", "dense", "dense_packed"),
    "endor": Stored("plain", "endor", "endor_packed"),
    "int8": Stored("int8", "dense", "dense_packed"),
    "spqr": Stored("plain", "spqr", "spqr_packed"),
    "spqr_ptcsr": Stored("plain", "spqr_ptcsr", "spqr_ptcsr_packed"),
}
PLACES = ("dram", "storage")
TOKEN = 7
STREAMED_TOKENS = 4  # in a turn, after one that fills the buffers


@dataclass(frozen=True)
class ModelTwin:
    """A Llama decoder of random weights: a model of `toolkit.models.shapes`, so many layers, and a vocabulary.

    `sparsity` is that of the dense weights and of what Endor packs; `outliers` the share that SpQR has. With `alike`
    the layers share their dense weights, so that a model larger than the memory can be written, piece by piece.
    """

    model: str = "tinyllama-1.1b"
    layers: int = 22
    vocabulary: int = 32_000
    sparsity: float = 0.5
    outliers: float = 0.01
    alike: bool = False


def twin_measurements(
    twin: ModelTwin,
    ways: Sequence[str],
    rivals: Sequence[str] = (),
    places: Sequence[str] = ("dram",),
    tokens: int = 16,
    repetitions: int = 3,
    fresh: bool = False,
) -> pd.DataFrame:
    """Seconds a token of each way and of llama.cpp, kept.

    Columns: way, place, repetition, seconds, read_bytes (for a token, in `storage`), layer_bytes, weights, head_bytes,
    mode, disturbed, measured_at. `seconds` is the mean of a turn's tokens, of which there are `STREAMED_TOKENS` in
    `storage`. Ways take turns. `layer_bytes` are those of the decoder linears, `weights` their number, `head_bytes`
    those of the head, which has 16 bits everywhere. llama.cpp is left out where it cannot run. Raises `UserError` for
    unknown names, fewer than 4 tokens or 1 repetition, or a way that gives other logits from the disk than from memory.
    """
    for names, known in ((ways, WAYS), (rivals, LLAMA_CPP), (places, PLACES)):
        for name in names:
            if name not in known:
                raise unknown("way", name, known)
    if tokens < 4 or repetitions < 1:
        raise UserError(f"tokens={tokens}, repetitions={repetitions}: expected 4 or more, and 1 or more")
    rivals = [] if not rivals or missing() else list(rivals)
    return _decoding(twin, list(ways), rivals, list(places), tokens, repetitions, fresh=fresh)


@measured
def _decoding(
    twin: ModelTwin, ways: Sequence[str], rivals: Sequence[str], places: Sequence[str], tokens: int, repetitions: int
) -> pd.DataFrame:
    model = twin_model(twin.model, twin.layers, torch.bfloat16, twin.sparsity, 0, twin.vocabulary, twin.alike)
    linears = [linear for block in decoder_blocks(model) for linear in decoder_linears(block).values()]
    shared = {"weights": sum(linear.weight.numel() for linear in linears)}
    shared |= {"head_bytes": model.lm_head.weight.nbytes}
    references = {name: Reference("the same weights in the other place") for name in ways}
    tables = []
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        _pack(model, twin, ways, folder)
        for place in places:
            counts = (STREAMED_TOKENS, 1) if place == "storage" else (tokens - 2, 2)
            with contextlib.ExitStack() as stack:
                contestants = [_ours(folder, name, place, twin.layers, sum(counts), references[name]) for name in ways]
                for name in rivals:
                    text = _text(sum(counts), Reference(name))
                    rival = LlamaCpp(name, model, folder, text, {"way": name, "place": place}, place == "storage")
                    stack.callback(rival.close)
                    rival.labels |= {"layer_bytes": rival.nbytes}
                    contestants.append(rival)
                spans = take_turns(contestants, repetitions, *counts, warm_up=1, stay_open=True)
                tables.append(_turns(spans))
    return pd.concat(tables, ignore_index=True).assign(**shared)


def _ours(folder: Path, name: str, place: str, layers: int, tokens: int, reference: Reference) -> StreamedModel:
    """A way of ours. Its logits are compared with its own in the other place: nobody else has the same weights."""
    way, store = WAYS[name], Store.open(folder / WAYS[name].store)
    labels = {"way": name, "place": place, "layer_bytes": sum(of.nbytes for of in store.layers_of(way.variant))}
    where = LayerMap(0, layers, 0) if place == "dram" else LayerMap(0, 0, layers)
    pipelined = Way(way.method, policy="pipelined", device="cpu")
    return StreamedModel(store, pipelined, _text(tokens, reference), labels, staged=False, placement=where)


def _text(tokens: int, reference: Reference) -> Text:
    return Text([torch.tensor([[TOKEN]])] * tokens, reference)


def _turns(spans: pd.DataFrame) -> pd.DataFrame:
    """Seconds a token of each turn, and the bytes read for it: for ours all that lie on the disk."""
    turns = by_turn(spans, ["way", "place", "layer_bytes"])
    read = turns["read_bytes"].where(turns["read_bytes"] > 0, turns["stored_bytes"])
    columns = ["way", "place", "repetition", "seconds", "layer_bytes", "mode", "disturbed", "measured_at"]
    return turns[columns].assign(read_bytes=read)


def _pack(model: nn.Module, twin: ModelTwin, ways: Sequence[str], folder: Path) -> None:
    """The stores that the ways read."""
    seeds = itertools.count()

    def random_form(form: type, weight: Tensor) -> Packed:
        return random_spqr(form, tuple(weight.shape), weight.dtype, twin.outliers, next(seeds))

    packs = {("int8", "dense"): partial(Scaled.encode, "dense")}
    packs |= {("plain", name): partial(encode, name) for name in ("dense", "endor")}
    packs |= {("plain", name): partial(random_form, form) for name, form in QUANTISED.items()}
    for store in dict.fromkeys(WAYS[way].store for way in ways):
        variants = [WAYS[way].variant for way in ways if WAYS[way].store == store]
        pack_model(model, folder / store, {name: packs[store, name] for name in variants}, twin.model)
