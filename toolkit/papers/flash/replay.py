"""A trace replayed on a model whose FFNs lie on disk by neuron: what each token reads, manages and computes.

    replay = Replay("opt-6.7b", layers=4, ways=("naive", "bundling"))
    replay_spans(replay)        # of all turns

The model is a shape-only twin (`toolkit.papers.flash.twin_bundles`), the trace drawn by a law of usage
(`toolkit.sparsity.synthetic`): a neuron of it is one that the predictor names, and a part of these really fires.
Reads, the manager of neurons, and products are real, and so are those of a low-rank predictor with random weights,
whose bytes stay in memory; what it gives is not used. Left out are attention over the context, norms, embeddings and
the head, alike for all ways.

The ways are those of LLM in a flash, table 2: each adds a technique to the one before it. The runtime's own parts do
the work: a `Streamer` brings what stays and what is read whole, the next layer while this one is computed (naive and
hybrid); a `NeuronFFN` a layer reads neurons, which it cannot do ahead, since the predictor needs the layer's own input.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from typing import cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from toolkit.formats.dense import Dense
from toolkit.kernels import dense
from toolkit.measure.contestant import Contestant
from toolkit.measure.turns import measured, take_turns
from toolkit.models.shapes import part_bytes, random_pruned
from toolkit.offload.budget import Budget
from toolkit.offload.neuron_ffn import Maths, NeuronFFN, ffn_of
from toolkit.offload.neuron_store import NeuronReads, NeuronStore
from toolkit.offload.plan import Plan
from toolkit.offload.streamer import Streamer
from toolkit.offload.ways import Way
from toolkit.papers.flash.cost_model import SCHEMES, Reads
from toolkit.papers.flash.twin_bundles import ATTENTION, DTYPE, neuron_shape, twin_bundles
from toolkit.predictors import Context, FromTrace, LowRank
from toolkit.residency.policies import SlidingWindow
from toolkit.residency.replay import most_held, units_of
from toolkit.sparsity.synthetic import UsageLaw, draw
from toolkit.sparsity.trace import Trace
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.bundles import adjoining
from toolkit.storage.readers import Reader, open_reader
from toolkit.storage.runs import Layer
from toolkit.storage.store import Store
from toolkit.timeline import Recorder

BUNDLE = "ffn.bundle"
NO_BUFFER = aligned_buffer(0)  # a twin's rows are whole blocks, so reads go straight into them
SAMPLE = 512  # neurons that a threshold is found with
PASSES = 2  # timed tokens of ways without a predictor
MEAN_RANK = 240  # of the predictors of OPT 6.7B: 128 in 28 layers, 1024 in 4 (FLASH, B.3)
ONE_AHEAD = Way("dense", policy="pipelined", device="cpu")


@dataclass(frozen=True)
class Replay(Reads):
    """The replayed model, a twin of `model` with so many layers, and tokens through it by each way.

    Args:
        model, layers, active, new, window: as in `Reads`. Layers are three or more, since two buffers would keep fewer
            in memory; the window includes the current token.
        depth: reads under way at once. Where the system refuses asynchronous reads, as many threads do them.
        ways: of `SCHEMES`.
        fired: share of the neurons that the predictor names that really fire: only their down columns are multiplied.
        tokens: timed tokens of each way with a predictor in each repetition, after `window` that are not timed. Ways
            without one take `PASSES`, since each of their tokens costs the same.
        rank: rank of each layer's predictor.
    """

    ways: Sequence[str] = tuple(SCHEMES)
    fired: float = 1 / 3
    tokens: int = 16
    repetitions: int = 2
    rank: int = MEAN_RANK
    seed: int = 0

    def trace(self) -> Trace:
        """The drawn trace: what the predictor names. Raises `UserError` for shares that no law has."""
        law = UsageLaw.fit(self.active, self.new, self.window)
        neurons, _, _ = neuron_shape(self.model)
        length = self.repetitions * (self.window + self.tokens)
        return draw(self.model, [law] * self.layers, neurons, length, self.seed)


@measured
def replay_spans(replay: Replay) -> pd.DataFrame:
    """The spans of all turns (`take_turns`), measured here or from the cache; a turn replays tokens by one way.

    Labels: way, model, layers, reader, held_bytes (of weights held or in buffers, predictors among them) and
    predictor_bytes. Raises `UserError` as `Replay` and `twin_bundles` do.
    """
    store, trace = twin_bundles(replay.model, replay.layers), replay.trace()
    active = [trace.active(layer)[0].numpy() for layer in range(trace.layers)]
    predictors = [_low_rank(replay, layer) for layer in range(trace.layers)]
    with open_reader(None, store, depth=replay.depth) as reader:
        racing = [
            NeuronReplay(replay, way, store, reader, active, predictors)
            if SCHEMES[way].predicted
            else LayerReplay(replay, way, store, reader)
            for way in replay.ways
        ]
        return take_turns(racing, replay.repetitions, replay.tokens, skipped=replay.window)


class LayerReplay(Contestant):
    """A way that keeps parts of layers in memory, and reads the others whole. A token of the turn is one of the trace.

    `pieces` of each layer are what a `Streamer` brings: a tier and the ops.
    """

    def __init__(self, replay: Replay, way: str, store: Store, reader: Reader):
        self.name, self.way, self.mode = way, SCHEMES[way], reader.mode
        self.replay, self.store, self.reader = replay, store, reader
        self.neurons, self.hidden, self.gated = neuron_shape(replay.model)
        self.x = torch.randn(self.hidden, generator=torch.Generator().manual_seed(replay.seed))
        self.pieces = [self._pieces(layer) for layer in range(replay.layers)]
        streamed = [piece.nbytes for pieces in self.pieces for tier, piece in pieces if tier == "storage"]
        stay = sum(piece.nbytes for pieces in self.pieces for tier, piece in pieces if tier == "dram")
        if streamed:
            self.turn, self.nbytes = (PASSES, 1), sum(streamed)
        self.labels = {"way": way, "model": replay.model, "layers": replay.layers, "reader": reader.name}
        self.held_bytes = stay + 2 * max(streamed, default=0)
        self.labels |= {"held_bytes": self.held_bytes, "predictor_bytes": 0}
        self.maths = self.maths_for(self.neurons)

    def maths_for(self, rows: int) -> Maths:
        """The FFN with a threshold: of so many neurons in memory, as many fire as fire of the whole layer."""
        drawn = [random_pruned((SAMPLE, self.hidden), 0, DTYPE, seed).float() for seed in range(1 + self.gated)]
        first, *rest = (weights @ self.x for weights in drawn)  # as those on the disk
        values = torch.nn.functional.silu(first) * rest[0] if rest else first.relu()
        share = min(1.0, self.replay.fired * self.replay.active * self.neurons / rows)
        return Maths("silu" if self.gated else "relu", self.gated, values.abs().quantile(1 - share).item())

    @contextmanager
    def open(self) -> Iterator[None]:
        """Memory with the parts that stay."""
        self.recorder = Recorder()
        tiers, layers = zip(*chain.from_iterable(self.pieces), strict=True)
        with Streamer(Plan(layers, tiers, ONE_AHEAD), self.reader, Budget("DRAM"), self.recorder) as self.streamer:
            yield

    def token(self, number: int) -> None:
        """Every layer, one after the other."""
        numbers = count()
        for layer, pieces in enumerate(self.pieces):
            weights: dict[str, Tensor] = {}
            for _ in pieces:
                found = self.streamer.layer(next(numbers))
                weights |= {op: cast(Dense, packed).values for op, packed in found.items()}
            bundles = [weights.pop(op) for op in [*weights] if op.startswith(BUNDLE)]
            nbytes = sum(weight.nbytes for weight in weights.values())
            with self.recorder.span("compute", "attention", "dram", nbytes, layer):
                for weight in weights.values():
                    dense.matvec(weight, self.x)
            self.ffn(layer, bundles)

    def ffn(self, layer: int, bundles: Sequence[Tensor]) -> None:
        """The products of all neurons, of which some fire."""
        for matrix in bundles:
            with self.recorder.span("compute", "ffn", "dram", matrix.nbytes, layer):
                ffn_of(matrix, None, self.x[None], self.maths)

    def _pieces(self, layer: int) -> list[tuple[str, Layer]]:
        """Attention and a part of the FFN stay in memory, as far as the way's share goes."""
        attention, bundle = self.store.layer(layer, ATTENTION).ops, self.store.layer(layer, "bundled").ops[BUNDLE]
        if not self.way.resident:
            return [("storage", Layer({**attention, BUNDLE: bundle}))]
        sizes = part_bytes(self.replay.model, DTYPE.itemsize)
        share = max(0.0, self.way.resident * sum(sizes.values()) - sizes[ATTENTION]) / sizes["ffn"]
        first = round(share * self.neurons)
        stays = Layer({**attention, f"{BUNDLE}, first": adjoining(bundle, 0, first)})
        return [("dram", stays), ("storage", Layer({BUNDLE: adjoining(bundle, first, self.neurons)}))]


class NeuronReplay(LayerReplay):
    """A way with a predictor: attention stays, and what the window lacks is read, neuron by neuron.

    `active[layer]` [tokens, neurons] is the trace, of which each turn has a part of its own. `predictors` are those
    whose products are timed.
    """

    def __init__(
        self,
        replay: Replay,
        way: str,
        store: Store,
        reader: Reader,
        active: Sequence[Bool[np.ndarray, "tokens neurons"]],
        predictors: Sequence[LowRank],
    ):
        super().__init__(replay, way, store, reader)
        self.predictors, self.opened, length = predictors, 0, replay.window + replay.tokens
        self.stay, self.width = replay.window if self.way.windowed else 1, self.hidden * (2 + self.gated)
        self.active = [[layer[at : at + length] for layer in active] for at in range(0, len(active[0]), length)]
        self.rows = [
            max(most_held(units_of(turn), SlidingWindow(self.neurons, self.stay)) for turn in turns)
            for turns in zip(*self.active, strict=True)
        ]
        predictor_bytes = sum(predictor.nbytes for predictor in predictors)
        held_bytes = self.held_bytes + sum(self.rows) * self.width * DTYPE.itemsize + predictor_bytes
        self.labels |= {"held_bytes": held_bytes, "predictor_bytes": predictor_bytes}
        self.maths = self.maths_for(max(self.rows))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Memory without neurons."""
        active, self.opened = self.active[self.opened % len(self.active)], self.opened + 1
        with super().open():
            self.ffns = [self._ffn(layer, named) for layer, named in enumerate(active)]
            yield
            del self.ffns

    def ffn(self, layer: int, bundles: Sequence[Tensor]) -> None:
        """Predict, bring what is not there, and multiply."""
        self.ffns[layer].product(self.x)

    def _pieces(self, layer: int) -> list[tuple[str, Layer]]:
        return [("dram", self.store.layer(layer, ATTENTION))]

    def _ffn(self, layer: int, active: Bool[np.ndarray, "tokens neurons"]) -> NeuronFFN:
        reads = NeuronReads(self.store.layer(layer, self.way.layout), layer, self.reader, NO_BUFFER, self.recorder)
        held = NeuronStore(SlidingWindow(self.neurons, self.stay, self.rows[layer]), self.width, DTYPE, reads)
        named = NamedByTrace(active, self.hidden, self.predictors[layer])
        return NeuronFFN(layer, held, named, self.maths, None, not self.way.windowed, self.recorder)


@dataclass(eq=False)
class NamedByTrace(FromTrace):
    """Names the trace's neurons, after the products of a low-rank predictor, whose answer is not used."""

    products: LowRank

    @property
    def nbytes(self) -> int:
        """Bytes of the low-rank predictor."""
        return self.products.nbytes

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons of the next token, rising."""
        self.products.predict(context)
        return super().predict(context)


def _low_rank(replay: Replay, layer: int) -> LowRank:
    """A layer's predictor, of random weights: only its time and its bytes count."""
    generator, (neurons, hidden, _) = torch.Generator().manual_seed(layer), neuron_shape(replay.model)
    shapes = (replay.rank, hidden), (neurons, replay.rank), (neurons,)
    return LowRank(0.0, *(torch.randn(shape, generator=generator).to(DTYPE) for shape in shapes))
