"""A trace replayed on a model whose FFNs lie on disk by neuron: what each token reads, manages and computes.

    replay = Replay("opt-6.7b", layers=4, ways=("naive", "bundling"))
    replay_measurements(replay)        # a row for each way, token and stage

The model is a shape-only twin (`toolkit.measure.twin_bundles`), the trace drawn by a law of usage
(`toolkit.activations.synthetic`): a neuron of it is one that the predictor names, and a part of these really fires.
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
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from toolkit.activations.synthetic import UsageLaw, draw
from toolkit.activations.trace import Trace
from toolkit.cache import kept
from toolkit.errors import UserError, unknown
from toolkit.formats.dense import Dense
from toolkit.kernels import dense, neurons
from toolkit.machines.probe import describe
from toolkit.measure.disturbance import Guard, Load
from toolkit.measure.twin_bundles import ATTENTION, DTYPE, neuron_shape, twin_bundles
from toolkit.models.shapes import part_bytes
from toolkit.offload.neuron_reads import NeuronReads
from toolkit.offload.neuron_store import NeuronStore
from toolkit.policies.neuron_ways import WAYS, NeuronWay
from toolkit.policies.sliding_window import SlidingWindow
from toolkit.predictors.low_rank import LowRank
from toolkit.simulation.replay import most_held
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.readers import Reader, open_scattered
from toolkit.storage.runs import Part
from toolkit.storage.store import Store
from toolkit.timeline.spans import Recorder, Timeline

BUNDLE = "ffn.bundle"
NO_BUFFER = aligned_buffer(0)  # a twin's rows are whole blocks, so reads go straight into them
SAMPLE = 512  # neurons that a threshold is found with
MEAN_RANK = 240  # of the predictors of OPT 6.7B: 128 in 28 layers, 1024 in 4 (FLASH, B.3)
COUNTS = ("window", "tokens", "passes", "repetitions", "rank", "depth")


@dataclass(frozen=True)
class Replay:
    """What to replay: a twin of `model` with so many layers, and tokens through it by each way.

    Args:
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

    def __post_init__(self):
        """Refuse numbers that make no sense."""
        for way in self.ways:
            if way not in WAYS:
                raise unknown("way", way, WAYS)
        counts = {name: getattr(self, name) for name in COUNTS}
        if min(counts.values()) < 1 or self.layers < 3:
            given = ", ".join(f"{name}={count}" for name, count in counts.items())
            raise UserError(
                f"{given}: expected 1 or more of each; layers={self.layers}: 3 or more, since two buffers would keep "
                "fewer in memory"
            )
        if not 0 < self.fired <= 1:
            raise UserError(f"fired={self.fired}: expected a share above 0, at most 1")

    def trace(self) -> Trace:
        """The drawn trace: what the predictor names. Raises `UserError` for shares that no law has."""
        law = UsageLaw.fit(self.active, exponent=1, new=self.new, tokens=self.window + 1)
        count, _, _ = neuron_shape(self.model)
        length = self.repetitions * (self.window + self.tokens)
        return draw(self.model, [law] * self.layers, count, length, self.seed)


@kept("replay", key=lambda: {"machine": describe()})
def replay_measurements(replay: Replay) -> pd.DataFrame:
    """A row for each way, repetition, token and stage of `Timeline.stages()`, measured here or from the cache.

    Columns more: neurons (read); memory_bytes (weights held or in buffers, predictors among them); predictor_bytes;
    predictor_s, a part of the stage `compute`; mode and reader; and of each way and repetition others_cores,
    stolen_cores and disturbed (`toolkit.measure.disturbance`). Raises `UserError` as `Replay` and `twin_bundles` do.
    """
    guard = Guard()
    turns = list(_turns(replay, guard))
    guard.close()
    return pd.concat([table.assign(**load.columns()) for table, load in turns], ignore_index=True)


def _turns(replay: Replay, guard: Guard) -> Iterator[tuple[pd.DataFrame, Load]]:
    """The tokens of each way and repetition, as they are read."""
    store, trace = twin_bundles(replay.model, replay.layers), replay.trace()
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(open_scattered(store, depth=replay.depth))
        twin = ReplayedTwin(replay, store, reader, [trace.active(layer)[0].numpy() for layer in range(trace.layers)])
        for repetition in range(1, replay.repetitions + 1):
            for way in replay.ways:
                first = (repetition - 1) * (replay.window + replay.tokens)
                labels = {"model": replay.model, "layers": replay.layers, "way": way, "repetition": repetition}
                labels |= {"mode": reader.mode, "reader": reader.name}
                labels |= {"predictor_bytes": WAYS[way].predicted * twin.predictor_bytes}
                with guard.turn() as load:
                    tokens = list(twin.tokens(WAYS[way], first))
                for number, (timeline, neurons_read, memory_bytes) in enumerate(tokens):
                    numbers = {"token": number, "neurons": neurons_read, "memory_bytes": memory_bytes}
                    numbers |= {"predictor_s": sum(s.seconds for s in timeline.spans if s.op == "predictor")}
                    yield timeline.stages().assign(**labels, **numbers), load


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

    def tokens(self, way: NeuronWay, first: int) -> Iterator[tuple[Timeline, int, int]]:
        """Each timed token, from number `first` of the trace on: neurons read, and bytes of weights in memory."""
        return self._by_neuron(way, first) if way.predicted else self._by_layer(way)

    def fetched(self, part: Part) -> dict[str, Tensor]:
        """The weights of a part of a layer, by op, in memory of their own."""
        buffer = aligned_buffer(part.nbytes)
        self.reader.read(part.ranges, buffer)
        return {op: cast(Dense, packed).values for op, packed in part.view(buffer).items()}

    def _by_neuron(self, technique: NeuronWay, first: int) -> Iterator[tuple[Timeline, int, int]]:
        window = self.replay.window if technique.windowed else 1
        held = [HeldLayer(self, layer, technique.layout, window, first) for layer in range(self.replay.layers)]
        memory = sum(layer.store.matrix.nbytes for layer in held) + sum(map(_nbytes, self.attention))
        memory += self.predictor_bytes
        threshold = self._threshold(max(len(layer.store.matrix) for layer in held))
        for token in range(self.replay.window + self.replay.tokens):
            recorder, before = Recorder(), sum(layer.store.rows_loaded for layer in held)
            for number, layer in enumerate(held):
                self._attend(recorder, self.attention[number], number)
                self._predict(recorder, number)
                layer.advance(recorder, layer.active[token], keep=technique.windowed)
                self._ffn(recorder, layer.store.used[0], threshold, number)
            if token >= self.replay.window:
                yield recorder.timeline(), sum(layer.store.rows_loaded for layer in held) - before, memory

    def _by_layer(self, technique: NeuronWay) -> Iterator[tuple[Timeline, int, int]]:
        resident, parts = zip(*(self._split(technique, layer) for layer in range(self.replay.layers)), strict=True)
        slots = [aligned_buffer(max(part.nbytes for part in parts)) for _ in range(2)]
        memory, threshold = (
            sum(map(_nbytes, resident)) + sum(slot.nbytes for slot in slots),
            self._threshold(self.count),
        )
        for token in range(-1, self.replay.passes):  # the first one is not timed
            recorder = Recorder()
            coming = self._submit(recorder, parts, slots, 0)
            for number, part in enumerate(parts):
                coming.result()
                weights = {op: packed.values for op, packed in part.view(slots[number % 2]).items()} | resident[number]
                if number + 1 < len(parts):
                    coming = self._submit(recorder, parts, slots, number + 1)
                bundles = [weights.pop(op) for op in [*weights] if op.startswith(BUNDLE)]
                self._attend(recorder, weights, number)
                for matrix in bundles:
                    self._ffn(recorder, matrix, threshold, number)
            if token >= 0:
                yield recorder.timeline(), 0, memory

    def _split(self, technique: NeuronWay, layer: int) -> tuple[dict[str, Tensor], Part]:
        """What of a layer stays in memory, attention first, and what is read for each token."""
        bundle = self.store.layer(layer, technique.layout).ops[BUNDLE]
        if not technique.resident:
            return {}, Part({**self.store.layer(layer, ATTENTION).ops, BUNDLE: bundle})
        sizes = part_bytes(self.replay.model, DTYPE.itemsize)
        share = max(0.0, technique.resident * sum(sizes.values()) - sizes[ATTENTION]) / sizes["ffn"]
        first = round(share * self.count)
        kept = self.fetched(Part({f"{BUNDLE}, kept": bundle.rows(0, first)}))
        return self.attention[layer] | kept, Part({BUNDLE: bundle.rows(first, self.count)})

    def _submit(self, recorder: Recorder, parts: Sequence[Part], slots: list[np.ndarray], layer: int) -> Future:
        span = recorder.span("read", "layer", "storage", parts[layer].nbytes, layer)
        return self.reader.submit(parts[layer].ranges, slots[layer % 2], span)

    def _attend(self, recorder: Recorder, weights: dict[str, Tensor], layer: int) -> None:
        with recorder.span("compute", "attention", "dram", _nbytes(weights), layer):
            for weight in weights.values():
                dense.matvec(weight, self.x, self.outputs[len(weight)])

    def _predict(self, recorder: Recorder, layer: int) -> None:
        predictor = self.predictors[layer]
        with recorder.span("compute", "predictor", "dram", predictor.nbytes, layer):
            predictor.mask(self.x[None])[0].nonzero()

    def _ffn(self, recorder: Recorder, matrix: Float[Tensor, "rows width"], threshold: float, layer: int) -> None:
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
        rows = self.fetched(Part({BUNDLE: layer.ops[BUNDLE].rows(0, min(SAMPLE, self.count))}))[BUNDLE].float()
        first, *rest = (
            rows[:, at : at + self.hidden] @ self.x for at in range(0, self.width - self.hidden, self.hidden)
        )
        value = torch.nn.functional.silu(first) * rest[0] if rest else first.relu()
        return value.abs()

    def _threshold(self, rows: int) -> float:
        """Where, of so many neurons in memory, as many fire as fire of the whole layer."""
        share = min(1.0, self.replay.fired * self.replay.active * self.count / rows)
        return self._values.quantile(1 - share).item()


class HeldLayer:
    """One layer's neurons in memory, the neurons that each token from `first` on needs, and the reads between."""

    def __init__(self, twin: ReplayedTwin, layer: int, layout: str, window: int, first: int):
        replay = twin.replay
        tokens = range(first, first + replay.window + replay.tokens)
        self.active = [np.flatnonzero(twin.active[layer][token]) for token in tokens]
        rows = most_held(self.active, SlidingWindow(twin.count, window))
        self.reads = NeuronReads(twin.store.layer(layer, layout), layer, twin.reader, NO_BUFFER, Recorder())
        self.store = NeuronStore(SlidingWindow(twin.count, window, rows), twin.width, DTYPE, self.reads)

    def advance(self, recorder: Recorder, active: Int64[np.ndarray, " active"], keep: bool) -> None:
        """Hold what the token needs; with `keep`, what the window keeps as well. What is no read is `manage`."""
        self.reads.recorder = recorder
        with self.reads.managing():
            if not keep:
                self.store.clear()
            self.store.advance(active)


def _nbytes(weights: dict[str, Tensor]) -> int:
    return sum(weight.nbytes for weight in weights.values())
