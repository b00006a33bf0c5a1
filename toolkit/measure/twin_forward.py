"""Decoding one token after another with a shape-only twin: SpQR beside fewer bits, pruned weights and llama.cpp.

    twin = ModelTwin("tinyllama-1.1b", layers=22)
    twin_measurements(twin, ["dense", "spqr"], ["llama.cpp Q3_K"], places=["dram", "storage"])

All weights are random, so only time is measured. In `dram` all layers stay in memory, and llama.cpp has loaded its file
in the order that its products like best. In `storage` every layer is read for each token, the next one while this one
is used, and llama.cpp maps its file, whose pages are dropped before each token.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
from toolkit.measure.llama_cpp import MODE, LlamaCpp, missing
from toolkit.measure.repetitions import kept_spans
from toolkit.measure.turns import drop_store_pages
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.twins import twin_model
from toolkit.offload.model import OffloadedModel
from toolkit.policies.methods import LLAMA_CPP
from toolkit.policies.placement import LayerMap
from toolkit.storage.packing import pack_model


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
    """Seconds a token of each way and of llama.cpp, kept: way, place, repetition, seconds, layer_bytes, weights, mode.

    `seconds` is the median of a turn's tokens; in `storage` a turn has `STREAMED_TOKENS`, and their mean counts, since
    the next token's first layers are read during this one. Ways take turns. `layer_bytes` are those of the decoder
    linears, `weights` their number, `head_bytes` those of the head, which has 16 bits everywhere. llama.cpp is left out
    where it cannot run. Raises `UserError` for unknown names, fewer than 4 tokens or 1 repetition, or a way that gives
    other logits from the disk than from memory.
    """
    for names, known in ((ways, WAYS), (rivals, LLAMA_CPP), (places, PLACES)):
        for name in names:
            if name not in known:
                raise unknown("way", name, known)
    if tokens < 4 or repetitions < 1:
        raise UserError(f"tokens={tokens}, repetitions={repetitions}: expected 4 or more, and 1 or more")
    rivals = [] if not rivals or missing() else list(rivals)
    key = {"twin": asdict(twin), "ways": list(ways), "rivals": rivals, "places": list(places)}
    key |= {"tokens": tokens, "repetitions": repetitions}

    def measure() -> pd.DataFrame:
        with scratch_folder(make_folder(paths.cache_dir())) as folder:
            return pd.DataFrame(_rows(twin, ways, rivals, places, tokens, repetitions, folder))

    return kept_spans(key, ("toolkit.measure.twin_forward",), measure, fresh)


def _rows(
    twin: ModelTwin,
    ways: Sequence[str],
    rivals: Sequence[str],
    places: Sequence[str],
    tokens: int,
    repetitions: int,
    folder: Path,
) -> Iterator[dict[str, object]]:
    model = twin_model(twin.model, twin.layers, torch.bfloat16, twin.sparsity, 0, twin.vocabulary, twin.alike)
    linears = [linear for block in decoder_blocks(model) for linear in decoder_linears(block).values()]
    shared = {"weights": sum(linear.weight.numel() for linear in linears)}
    shared |= {"head_bytes": model.lm_head.weight.nbytes}
    _pack(model, twin, ways, folder)
    expected: dict[str, Tensor] = {}
    for place in places:
        with contextlib.ExitStack() as stack:
            runtimes = [
                *(stack.enter_context(_Ours(folder, name, place, twin.layers)) for name in ways),
                *(stack.enter_context(_Rival(model, name, folder, place)) for name in rivals),
            ]
            for runtime in runtimes[: len(ways)]:
                if not torch.equal(expected.setdefault(runtime.name, runtime.logits), runtime.logits):
                    raise UserError(f"{runtime.name} gives other logits from the disk than from memory: not timed")
            for repetition, runtime in itertools.product(range(1, repetitions + 1), runtimes):
                row = {"way": runtime.name, "place": place, "repetition": repetition}
                row |= {"seconds": runtime.seconds(tokens), "layer_bytes": runtime.layer_bytes, "mode": runtime.mode}
                yield row | shared


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


class _Ours:
    """A way of ours, opened."""

    def __init__(self, folder: Path, name: str, place: str, layers: int):
        self.name, way = name, WAYS[name]
        where = LayerMap(0, layers, 0) if place == "dram" else LayerMap(0, 0, layers)
        self.streamed, self.variant = place == "storage", way.variant
        self.model = OffloadedModel.open(folder / way.store, way.method, placement=where, verify=False)
        self.mode = self.model.mode if self.streamed else "memory"
        self.layer_bytes = sum(layer.nbytes for layer in self.model.store.layers_of(way.variant))
        self.logits = self._decode(2)[1]  # the second token is the first that is taken by the step for single tokens

    def seconds(self, tokens: int) -> float:
        """Of a token, as `twin_measurements` counts them."""
        if self.streamed:
            return statistics.mean(self._decode(1 + STREAMED_TOKENS)[0][1:])
        return statistics.median(self._decode(tokens)[0][2:])

    @torch.no_grad()
    def _decode(self, tokens: int) -> tuple[list[float], Tensor]:
        """Seconds of each token's pass, and the logits of the last one."""
        seconds, past = [], None
        for _ in range(tokens):
            if self.streamed and self.mode != "direct":
                drop_store_pages(self.model.store, self.variant)
            start = time.perf_counter()
            found = self.model.model(torch.tensor([[TOKEN]]), past_key_values=past, use_cache=True)
            seconds.append(time.perf_counter() - start)
            past = found.past_key_values
        return seconds, found.logits

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.model.close()


class _Rival:
    """llama.cpp with a file of its own."""

    def __init__(self, model: nn.Module, name: str, folder: Path, place: str):
        self.name, self.streamed = name, place == "storage"
        self.runtime = LlamaCpp(model, name, folder, mapped=self.streamed)
        self.mode = MODE if self.streamed else "memory"
        self.layer_bytes = self.runtime.stored_bytes
        if not self.streamed:
            self.runtime.generated([TOKEN], 2)

    def seconds(self, tokens: int) -> float:
        """Of a token, as `twin_measurements` counts them."""
        if self.streamed:
            return statistics.mean(self.runtime.timed().total_s for _ in range(STREAMED_TOKENS))
        return self.runtime.generated([TOKEN], tokens)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.runtime.close()
