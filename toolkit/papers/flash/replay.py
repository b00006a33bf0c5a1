"""A trace replayed on a model whose FFNs lie on disk by neuron: what each token reads, manages and computes.

    replay = Replay("opt-6.7b", layers=4, ways=("naive", "bundling"))
    replay_spans(replay)        # of all turns

The model is a shape-only twin (`toolkit.papers.flash.twin_bundles`), the trace drawn by a law of usage
(`toolkit.sparsity.synthetic`): a neuron of it is one that the predictor names, and a part of these really fires.
Reads, the manager of neurons, and products are real, and so are those of a low-rank predictor with random weights,
whose bytes stay in memory; what it gives is not used. Left out are attention over the context, norms, embeddings and
the head, alike for all ways.

The ways are those of LLM in a flash, table 2: each adds a technique to the one before it. Ways that know what they will
read, naive and hybrid, read a layer while they compute the one before; the others cannot, since the predictor needs the
layer's own input.
"""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from toolkit.cache import kept
from toolkit.costs.neuron_reads import WAYS
from toolkit.costs.probe import describe
from toolkit.costs.replay import most_held, units_of
from toolkit.formats.dense import Dense
from toolkit.kernels import dense, neurons
from toolkit.measure.contestant import Contestant
from toolkit.measure.turns import take_turns
from toolkit.models.shapes import part_bytes
from toolkit.offload.neuron_reads import NeuronReads
from toolkit.offload.neuron_store import NeuronStore
from toolkit.papers.flash.twin_bundles import ATTENTION, DTYPE, neuron_shape, twin_bundles
from toolkit.policies.residencies import SlidingWindow
from toolkit.predictors.low_rank import LowRank
from toolkit.sparsity.synthetic import UsageLaw, draw
from toolkit.sparsity.trace import Trace
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.bundles import adjoining
from toolkit.storage.readers import Reader, open_scattered
from toolkit.storage.runs import Layer
from toolkit.storage.store import Store
from toolkit.timeline import Recorder

BUNDLE = "ffn.bundle"
NO_BUFFER = aligned_buffer(0)  # a twin's rows are whole blocks, so reads go straight into them
SAMPLE = 512  # neurons that a threshold is found with
MEAN_RANK = 240  # of the predictors of OPT 6.7B: 128 in 28 layers, 1024 in 4 (FLASH, B.3)


@dataclass(frozen=True)
class Replay:
    """The replayed model, a twin of `model` with so many layers, and tokens through it by each way.

    Args:
        layers: three or more, since two buffers would keep fewer in memory.
        active: share of a layer's neurons that the predictor names for a token.
        fired: share of them that really fire: only their down columns are multiplied.
        new: share of a layer's neurons that a token with a window of `window` reads.
        window: tokens whose neurons stay, the current one among them.
        tokens: timed tokens of each way with a predictor in each repetition, after `window` that are not timed. Ways
            without one take `passes`, since each of their tokens costs the same.
        rank: rank of each layer's predictor.
        depth: reads under way at once. Where the system refuses asynchronous reads, as many threads do them.
    """

    model: str
    layers: int
    ways: Sequence[str] = tuple(WAYS)
    active: float = 0.10
    fired: float = 1 / 3
    new: float = 0.024
    window: int = 4
    tokens: int = 16
    passes: int = 2
    repetitions: int = 2
    rank: int = MEAN_RANK
    depth: int = 32
    seed: int = 0

    def trace(self) -> Trace:
        """The drawn trace: what the predictor names. Raises `UserError` for shares that no law has."""
        law = UsageLaw.fit(self.active, exponent=1, new=self.new, tokens=self.window + 1)
        count, _, _ = neuron_shape(self.model)
        length = self.repetitions * (self.window + self.tokens)
        return draw(self.model, [law] * self.layers, count, length, self.seed)


@kept("replay", key=lambda: {"machine": describe()})
def replay_spans(replay: Replay) -> pd.DataFrame:
    """The spans of all turns (`take_turns`), measured here or from the cache; a turn replays tokens by one way.

    Labels: way, model, layers, reader, held_bytes (of weights held or in buffers, predictors among them) and
    predictor_bytes. Raises `UserError` as `Replay` and `twin_bundles` do.
    """
    store, trace = twin_bundles(replay.model, replay.layers), replay.trace()
    with open_scattered(store, depth=replay.depth) as reader:
        twin = ReplayedTwin(replay, store, reader, [trace.active(layer)[0].numpy() for layer in range(trace.layers)])
        racing = [(NeuronReplay if WAYS[way].predicted else LayerReplay)(twin, way) for way in replay.ways]
        return take_turns(racing, replay.repetitions, replay.tokens, skipped=replay.window)


class ReplayedTwin:
    """The twin with attention in memory, and what its ways share. `active[layer]` [tokens, neurons] is the trace."""

    def __init__(self, replay: Replay, store: Store, reader: Reader, active: list[np.ndarray]):
        self.replay, self.store, self.reader, self.active = replay, store, reader, active
        self.count, self.hidden, gated = neuron_shape(replay.model)
        self.width = self.hidden * (3 if gated else 2)
        self.activation = "silu" if gated else "relu"
        self.x = torch.randn(self.hidden, generator=torch.Generator().manual_seed(replay.seed))
        self.attention = [self.fetched(layer) for layer in store.layers_of(ATTENTION)]
        self.outputs = {len(weight): torch.empty(len(weight)) for weight in self.attention[0].values()}
        self.sum = torch.empty(self.hidden)
        self.predictors = [self._predictor(layer) for layer in range(replay.layers)]
        self.predictor_bytes = sum(predictor.nbytes for predictor in self.predictors)
        self._values = self._sampled_values()

    def fetched(self, part: Layer) -> dict[str, Tensor]:
        """The weights of a part of a layer, by op, in memory of their own."""
        buffer = aligned_buffer(part.nbytes)
        self.reader.read(part.chunks, buffer)
        return {op: cast(Dense, packed).values for op, packed in part.view(buffer).items()}

    def attend(self, recorder: Recorder, weights: dict[str, Tensor], layer: int) -> None:
        """The products of attention's weights."""
        with recorder.span("compute", "attention", "dram", _nbytes(weights), layer):
            for weight in weights.values():
                dense.matvec(weight, self.x, self.outputs[len(weight)])

    def predict(self, recorder: Recorder, layer: int) -> None:
        """The products of a predictor; its answer is not used."""
        predictor = self.predictors[layer]
        with recorder.span("compute", "predictor", "dram", predictor.nbytes, layer):
            predictor.mask(self.x[None])[0].nonzero()

    def ffn(self, recorder: Recorder, matrix: Float[Tensor, "rows width"], threshold: float, layer: int) -> None:
        """The FFN of the neurons in memory, of which some fire."""
        with recorder.span("compute", "ffn", "dram", matrix.nbytes, layer):
            neurons.ffn(matrix, self.x, self.activation, threshold=threshold, out=self.sum)

    def _predictor(self, layer: int) -> LowRank:
        """A layer's predictor, of random weights: only its time and its bytes count."""
        generator = torch.Generator().manual_seed(layer)
        shapes = (self.replay.rank, self.hidden), (self.count, self.replay.rank), (self.count,)
        return LowRank(0.0, *(torch.randn(shape, generator=generator).to(DTYPE) for shape in shapes))

    def _sampled_values(self) -> Float32[Tensor, " sample"]:
        """|activation| of some neurons, as the kernel compares them with a threshold."""
        layer = self.store.layer(0, "bundled")
        rows = self.fetched(Layer({BUNDLE: adjoining(layer.ops[BUNDLE], 0, min(SAMPLE, self.count))}))[BUNDLE].float()
        first, *rest = (
            rows[:, at : at + self.hidden] @ self.x for at in range(0, self.width - self.hidden, self.hidden)
        )
        value = torch.nn.functional.silu(first) * rest[0] if rest else first.relu()
        return value.abs()

    def threshold(self, rows: int) -> float:
        """Where, of so many neurons in memory, as many fire as fire of the whole layer."""
        share = min(1.0, self.replay.fired * self.replay.active * self.count / rows)
        return self._values.quantile(1 - share).item()


class Replayed(Contestant):
    """One way through the twin. A token of the turn is one of the trace."""

    def __init__(self, twin: ReplayedTwin, way: str):
        self.name, self.twin, self.way, self.mode = way, twin, WAYS[way], twin.reader.mode
        replay = twin.replay
        self.labels = {"way": way, "model": replay.model, "layers": replay.layers, "reader": twin.reader.name}
        self.labels |= {"predictor_bytes": self.way.predicted * twin.predictor_bytes}


class NeuronReplay(Replayed):
    """A way with a predictor: what the window lacks is read, neuron by neuron. Each turn has a trace of its own."""

    def __init__(self, twin: ReplayedTwin, way: str):
        super().__init__(twin, way)
        replay, active = twin.replay, twin.active
        self.length = replay.window + replay.tokens
        self.tokens = replay.window if self.way.windowed else 1
        turns = [slice(at, at + self.length) for at in range(0, len(active[0]), self.length)]
        self.needed = [[units_of(layer[turn]) for layer in active] for turn in turns]
        self.rows = [
            max(most_held(needed, SlidingWindow(twin.count, self.tokens)) for needed in of_layer)
            for of_layer in zip(*self.needed, strict=True)
        ]
        held = sum(self.rows) * twin.width * DTYPE.itemsize + sum(map(_nbytes, twin.attention))
        self.labels |= {"held_bytes": held + twin.predictor_bytes}
        self.threshold, self.opened = twin.threshold(max(self.rows)), 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Memory without neurons."""
        twin, self.recorder = self.twin, Recorder()
        self.needs, self.opened = self.needed[self.opened % len(self.needed)], self.opened + 1
        self.stores = []
        for layer, rows in enumerate(self.rows):
            part = twin.store.layer(layer, self.way.layout)
            reads = NeuronReads(part, layer, twin.reader, NO_BUFFER, self.recorder)
            self.stores.append(NeuronStore(SlidingWindow(twin.count, self.tokens, rows), twin.width, DTYPE, reads))
        yield
        del self.stores

    def token(self, number: int) -> None:
        """Every layer, one thing at a time. The time of a change of neurons that is not reading is `manage`."""
        for layer, store in enumerate(self.stores):
            self.twin.attend(self.recorder, self.twin.attention[layer], layer)
            self.twin.predict(self.recorder, layer)
            with store.fetch.managing():
                if not self.way.windowed:
                    store.clear()
                store.advance(self.needs[layer][number])
            self.twin.ffn(self.recorder, store.used[0], self.threshold, layer)


class LayerReplay(Replayed):
    """A way that reads whole layers, or what does not stay of them, while it computes the layer before."""

    def __init__(self, twin: ReplayedTwin, way: str):
        super().__init__(twin, way)
        parts = [self._split(layer) for layer in range(twin.replay.layers)]
        self.resident, self.parts = zip(*parts, strict=True)
        self.slots = [aligned_buffer(max(part.nbytes for part in self.parts)) for _ in range(2)]
        self.nbytes, self.turn = sum(part.nbytes for part in self.parts), (twin.replay.passes, 1)
        held = sum(map(_nbytes, self.resident)) + sum(slot.nbytes for slot in self.slots)
        self.labels |= {"held_bytes": held}
        self.threshold, self.recorder = twin.threshold(twin.count), Recorder()

    def _split(self, layer: int) -> tuple[dict[str, Tensor], Layer]:
        """The parts of a layer that stay in memory, attention first, and those that are read for each token."""
        twin = self.twin
        bundle = twin.store.layer(layer, self.way.layout).ops[BUNDLE]
        if not self.way.resident:
            return {}, Layer({**twin.store.layer(layer, ATTENTION).ops, BUNDLE: bundle})
        sizes = part_bytes(twin.replay.model, DTYPE.itemsize)
        share = max(0.0, self.way.resident * sum(sizes.values()) - sizes[ATTENTION]) / sizes["ffn"]
        first = round(share * twin.count)
        kept = twin.fetched(Layer({f"{BUNDLE}, kept": adjoining(bundle, 0, first)}))
        return twin.attention[layer] | kept, Layer({BUNDLE: adjoining(bundle, first, twin.count)})

    def token(self, number: int) -> None:
        """Every layer, while the next one is read."""
        coming = self._submit(0)
        for layer, part in enumerate(self.parts):
            coming.result()
            weights = {op: packed.values for op, packed in part.view(self.slots[layer % 2]).items()}
            weights |= self.resident[layer]
            if layer + 1 < len(self.parts):
                coming = self._submit(layer + 1)
            bundles = [weights.pop(op) for op in [*weights] if op.startswith(BUNDLE)]
            self.twin.attend(self.recorder, weights, layer)
            for matrix in bundles:
                self.twin.ffn(self.recorder, matrix, self.threshold, layer)

    def _submit(self, layer: int) -> Future:
        span = self.recorder.span("read", "layer", "storage", self.parts[layer].nbytes, layer)
        return self.twin.reader.submit(self.parts[layer].chunks, self.slots[layer % 2], span)


def _nbytes(weights: dict[str, Tensor]) -> int:
    return sum(weight.nbytes for weight in weights.values())
