"""Passes through one layer of a store, timed: its operations are read, unpacked and used, each step a span.

    with twin_store({"fc1": (36864, 9216)}, torch.float16, 0.5, ["dense", "endor"]) as store:
        for case, repetition, mode, timeline in timed_passes(store, [Case("dense"), Case("endor")], repetitions=5):
            ...

The layer is a shape-only twin: random weights, since time does not depend on their values. The device is the CPU.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toolkit import paths
from toolkit.errors import UserError, unknown
from toolkit.formats import Packed
from toolkit.formats.dense import Dense
from toolkit.offload.cpu import pack, product, unpack
from toolkit.offload.timeline import Recorder, Timeline
from toolkit.shapes import random_pruned
from toolkit.simulation.transfer import METHODS, POLICIES
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.readers import Reader, open_reader
from toolkit.storage.runs import Layer, OpRun
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store

PLACEMENTS = ("storage", "dram")


@dataclass(frozen=True)
class Case:
    """One way through the layer. Raises `UserError` for an unknown method, placement or policy."""

    method: str
    placement: str = "storage"
    policy: str = "sequential"

    def __post_init__(self):
        """Refuse unknown names."""
        for kind, known in {"method": METHODS, "placement": PLACEMENTS, "policy": POLICIES}.items():
            if getattr(self, kind) not in known:
                raise unknown(kind, getattr(self, kind), known)


@dataclass(frozen=True, eq=False)
class Weight:
    """An operation's place in the layer: its runs, one for each block of rows, and how large it is when dense."""

    name: str
    runs: tuple[OpRun, ...]
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def stored_bytes(self) -> int:
        """What a read of it takes from the disk."""
        return sum(run.nbytes for run in self.runs)

    @property
    def dense_bytes(self) -> int:
        """When unpacked."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def place(self, layer: Layer) -> slice:
        """Its bytes in a buffer that holds the layer."""
        start = self.runs[0].offset - layer.offset
        return slice(start, start + self.stored_bytes)


@contextlib.contextmanager
def twin_store(
    shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, sparsity: float, forms: Sequence[str]
) -> Iterator[Store]:
    """A store of one random layer in these formats, on the disk of the cache; gone afterwards.

    Each operation's bytes in each format are read back and checked against the pruned weight. Raises `UserError` if
    one differs, or the disk is too small.
    """
    paths.cache_dir().mkdir(parents=True, exist_ok=True)
    weights = {op: random_pruned(shape, sparsity, dtype, seed) for seed, (op, shape) in enumerate(shapes.items())}
    with tempfile.TemporaryDirectory(prefix=".twin-", dir=paths.cache_dir()) as folder:
        target = Path(folder) / "store"
        total = len(forms) * sum(weight.nbytes for weight in weights.values())
        write_store(target, _packed(weights, forms), model={"name": "twin"}, expected_bytes=total)
        store = Store.open(target)
        for form in forms:
            _check(store, form, weights)
        weights.clear()
        yield store


def _packed(weights: Mapping[str, Tensor], forms: Sequence[str]) -> Iterator[Op]:
    for form in forms:
        for op, weight in weights.items():
            for number, part in enumerate(pack(form, weight)):
                yield Op(0, f"{op}.{number}", form, part)


def _check(store: Store, form: str, weights: Mapping[str, Tensor]) -> None:
    buffer, layer = aligned_buffer(store.slot_bytes(form)), store.layer(0, form)
    with open_reader("threads", store, form) as reader:
        reader.read([layer], buffer)
    for weight in _weights(layer):
        expected = weights[weight.name]
        found = unpack(_parts(weight, layer, buffer), torch.empty_like(expected))
        if not torch.equal(found, expected):
            raise UserError(f"{weight.name} read back as {form} is not the weight that was written: nothing is timed")


def timed_passes(store: Store, cases: Sequence[Case], repetitions: int) -> Iterator[tuple[Case, int, str, Timeline]]:
    """Each case `repetitions` times and once before: the case, the repetition from 0, the reader's mode, the timeline.

    A slow spell of the disk hits one repetition of every case, since repetitions are the outer loop. Files are opened
    anew for each pass, which drops what the page cache may hold of them. Raises `UserError` for no repetition.
    """
    if repetitions < 1:
        raise UserError(f"repetitions={repetitions}: expected 1 or more; one more goes before them")
    forms = {METHODS[case.method].format for case in cases}
    buffers = {form: aligned_buffer(store.slot_bytes(form)) for form in forms}
    largest = max(weight.dense_bytes for form in forms for weight in _weights(store.layer(0, form)))
    dense = aligned_buffer(largest)
    views = {form: _views(store, form, buffers[form], dense) for form in forms}
    for repetition in range(repetitions + 1):
        for case in cases:
            form = METHODS[case.method].format
            with open_reader("threads", store, form) as reader:
                timeline = _pass(case, reader, store.layer(0, form), buffers[form], views[form])
                yield case, repetition, reader.mode, timeline


def _views(store: Store, form: str, buffer: np.ndarray, dense: np.ndarray) -> dict[Weight, tuple[list[Packed], Tensor]]:
    """Each weight's blocks where they are read to, and where it is unpacked to: made once, as a streamer does.

    Making them takes as long as a small weight's product. They are checked against what they show, so it is read.
    """
    layer = store.layer(0, form)
    with open_reader("threads", store, form) as reader:
        reader.read([layer], buffer)
    return {weight: (_parts(weight, layer, buffer), _out(weight, dense)) for weight in _weights(layer)}


def _pass(
    case: Case,
    reader: Reader,
    layer: Layer,
    buffer: np.ndarray,
    views: Mapping[Weight, tuple[list[Packed], Tensor]],
) -> Timeline:
    vectors = {columns: torch.randn(columns) for _, columns in (weight.shape for weight in views)}
    if case.placement == "dram":
        reader.read([layer], buffer)
    recorder = Recorder()

    def read(weight: Weight) -> Weight:
        if case.placement == "storage":
            with recorder.span("read", weight.name, "storage", weight.stored_bytes, layer=0):
                reader.read(weight.runs, buffer[weight.place(layer)])
        return weight

    with ThreadPoolExecutor(1) as link:
        for weight in ARRIVALS[case.policy](link)(read, views):
            operand = _operand(case, recorder, weight, *views[weight])
            with recorder.span("compute", weight.name, "dram", operand.nbytes, layer=0):
                product(operand, vectors[weight.shape[1]])
    return recorder.timeline()


# policy -> how operations arrive: each read when the one before it has been used, or all of them, one after the other
ARRIVALS: dict[str, Callable] = {"sequential": lambda link: map, "pipelined": lambda link: link.map}


def _operand(case: Case, recorder: Recorder, weight: Weight, parts: list[Packed], out: Tensor) -> Tensor | Packed:
    """What the product is taken with: the weight made dense, or as it was stored."""
    method = METHODS[case.method]
    if not method.decoded_in:
        return parts[0].values if isinstance(parts[0], Dense) else parts[0]
    with recorder.span("decode", weight.name, "dram", weight.dense_bytes, layer=0):
        return unpack(parts, out)


def _weights(layer: Layer) -> list[Weight]:
    """The layer's operations in their order, each with its blocks."""
    runs: dict[str, list[OpRun]] = {}
    for name, run in layer.ops.items():
        runs.setdefault(name.rpartition(".")[0], []).append(run)
    return [
        Weight(name, tuple(blocks), (sum(run.shape[0] for run in blocks), blocks[0].shape[1]), blocks[0].dtype)
        for name, blocks in runs.items()
    ]


def _parts(weight: Weight, layer: Layer, buffer: np.ndarray) -> list[Packed]:
    """The blocks, in place: views of the buffer that they were read into."""
    return [run.view(buffer[run.offset - layer.offset :]) for run in weight.runs]


def _out(weight: Weight, dense: np.ndarray) -> Tensor:
    return torch.from_numpy(dense[: weight.dense_bytes]).view(weight.dtype).view(weight.shape)
