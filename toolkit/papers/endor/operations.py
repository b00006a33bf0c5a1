"""Passes through one layer of a store: its operations are read, decoded and used, and each step is a span.

    with twin_stores({"fc1": (36864, 9216)}, torch.float16, 0.5, ["dense", "endor"]) as stores:
        ways = [(Way("dense", device="cpu"), "storage"), (Way("endor", device="cpu"), "storage")]
        take_turns(layer_passes(stores, ways), repetitions=5, warm_up=1)

The layer is a shape-only twin: random weights, since time does not depend on their values. It lies on the disk several
times, since a file's speed depends on where it lies. The device is the CPU. `measured_spans` keeps the spans, by
machine, disk and code.
"""

import contextlib
import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from toolkit import paths
from toolkit.errors import UserError, unknown
from toolkit.files import check_space, make_folder, new_folder, scratch_folder
from toolkit.formats import Packed, encode
from toolkit.formats.packed import DTYPES
from toolkit.formats.scaled import Scaled, unpacked
from toolkit.measure.accelerate import AcceleratedLinear
from toolkit.measure.contestant import Contestant, Reference
from toolkit.measure.turns import measured, take_turns
from toolkit.models.shapes import random_pruned
from toolkit.models.workload import Workload
from toolkit.offload.methods import RIVALS
from toolkit.offload.ways import POLICIES, Placed
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.readers import open_reader
from toolkit.storage.runs import OpRun
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store
from toolkit.timeline import Recorder, Timeline

PLACEMENTS = ("storage", "dram")
PLACES = 3  # of the disk, which turns read from one after the other: they differ by up to 8 % (benchmarks/README.md)
TOLERANCE = 0.02  # of the largest product: sums in other orders, and torch's are rounded to the weight's type
SCALES_DTYPE = torch.float16  # of int8 twins: ENDOR's models are float16


@contextlib.contextmanager
def twin_stores(
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    sparsity: float,
    forms: Sequence[str],
    places: int = PLACES,
) -> Iterator[list[Store]]:
    """A store of one random layer in these formats, and copies of it at other places of the cache's disk.

    They are removed afterwards. int8 rows have scales. Each operation's bytes in each format are read back from every
    place and checked against the pruned weight. Raises `UserError` if one differs, or the disk is too small.
    """
    weights = {op: random_pruned(shape, sparsity, dtype, seed) for seed, (op, shape) in enumerate(shapes.items())}
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        first, *others = (folder / f"store-{number}" for number in range(places))
        total = len(forms) * sum(weight.nbytes for weight in weights.values())
        check_space(folder, places * total)
        write_store(first, _packed(weights, forms), model={"name": "twin"})
        for other in others:
            with new_folder(other) as copy:
                shutil.copytree(first, copy, dirs_exist_ok=True)
        stores = [Store.open(place) for place in (first, *others)]
        for store, form in itertools.product(stores, forms):
            _check(store, form, weights)
        weights.clear()
        yield stores


def _packed(weights: Mapping[str, Tensor], forms: Sequence[str]) -> Iterator[Op]:
    for form in forms:
        for op, weight in weights.items():
            yield Op.of(0, op, form, _with_scales(encode(form, weight)))


def _with_scales(packed: Packed) -> Packed:
    """Integers get scales, as int8 weights have them. The values of the scales do not matter."""
    if packed.dtype != torch.int8:
        return packed
    return Scaled(packed, torch.full(packed.shape[:1], 1 / 1024, dtype=SCALES_DTYPE))


def _check(store: Store, form: str, weights: Mapping[str, Tensor]) -> None:
    for op, packed in _weights(store, form, aligned_buffer(store.slot_bytes(form))).items():
        if not torch.equal(packed.stored.unpack_into(torch.empty_like(weights[op])), weights[op]):
            raise UserError(f"{op} read back as {form} is not the weight that was written: nothing is timed")


@measured
def measured_spans(
    workload: Workload,
    shapes: Mapping[str, tuple[int, int]],
    ways: Sequence[Placed],
    repetitions: int,
    places: int = PLACES,
) -> pd.DataFrame:
    """One row per span: the fields of `Way`, placement, and the columns of `take_turns`. One turn of each warms up.

    Accelerate may be among the ways if there is a single shape. The layer lies at so many places of the disk.
    """
    dtype, ours = DTYPES[workload.dtype], [case for case in ways if case[0].method not in RIVALS]
    with contextlib.ExitStack() as stack:
        forms = list(dict.fromkeys(way.stored.format for way, _ in ours))
        stores = stack.enter_context(twin_stores(shapes, dtype, workload.sparsity, forms, places))
        contestants = layer_passes(stores, ours)
        for case in [case for case in ways if case[0].method in RIVALS]:
            (shape,) = shapes.values()
            folder = stack.enter_context(scratch_folder(paths.cache_dir()))
            weight = random_pruned(shape, workload.sparsity, dtype)
            contestants.append(AcceleratedLinear(weight, folder / "weights", labels(case)))
            del weight  # it may take a large part of memory
        return take_turns(contestants, repetitions, warm_up=1)


def spans_of(spans: pd.DataFrame, placed: Placed) -> pd.DataFrame:
    """The rows of one way and placement."""
    wanted = pd.Series(labels(placed))
    return spans[(spans[list(wanted.index)] == wanted).all(axis=1)]


def layer_passes(stores: Sequence[Store], cases: Sequence[Placed]) -> list["LayerPass"]:
    """A contestant for each way and placement; each turn reads the next store, all of which hold the same.

    Raises `UserError` for an unknown placement.
    """
    for _, placement in cases:
        if placement not in PLACEMENTS:
            raise unknown("placement", placement, PLACEMENTS)
    layer = LayerInMemory(stores, dict.fromkeys(way.stored.format for way, _ in cases))
    return [LayerPass(layer, case) for case in cases]


def labels(placed: Placed) -> dict[str, str]:
    """The columns that tell a way and placement from others."""
    way, placement = placed
    return asdict(way) | {"placement": placement}


class LayerInMemory:
    """The parts that passes through one layer share: its weights in each format, and a vector for each width.

    `reference` has the products of the weights made dense; packed weights may add in another order.
    """

    def __init__(self, stores: Sequence[Store], forms: Iterable[str]):
        self.stores, store = stores, stores[0]
        self.buffers = {form: aligned_buffer(store.slot_bytes(form)) for form in forms}
        self.weights = {form: _weights(store, form, buffer) for form, buffer in self.buffers.items()}
        form, weights = next(iter(self.weights.items()))
        runs = store.layer(0, form).ops.values()
        self.dense = aligned_buffer(max(run.dense_bytes for run in runs))
        self.vectors = {run.shape[1]: torch.randn(run.shape[1]) for run in runs}
        products = [unpacked(weights[run.op], self.out(run)).matvec(self.vectors[run.shape[1]]) for run in runs]
        self.reference = Reference("the weights made dense", [torch.cat(products)], TOLERANCE)

    def out(self, run: OpRun) -> Tensor:
        """Memory for the dense matrix of an operation; all share it."""
        return torch.from_numpy(self.dense[: run.dense_bytes]).view(run.dtype).view(run.shape)


class LayerPass(Contestant):
    """The operations of a layer are read, decoded and multiplied with a vector each, by one way.

    Each turn opens the files of the next store, which drops what the page cache may hold of them.
    """

    exact = False

    def __init__(self, shared: LayerInMemory, case: Placed):
        (self.way, placement), self.labels = case, labels(case)
        self.name = f"{self.way.method}, {self.way.policy}, {placement},"
        self.shared, self.reference = shared, shared.reference
        self.form, self.is_read = self.way.stored.format, placement == "storage"
        self.layer, self.buffer = shared.stores[0].layer(0, self.form), shared.buffers[self.form]
        self.places = itertools.cycle(shared.stores)
        self.nbytes = self.layer.nbytes if self.is_read else 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """The files, and the layer in its buffer if it is in DRAM."""
        with open_reader(None, next(self.places), self.form) as self.reader:
            if not self.is_read:
                self.reader.read(self.layer.chunks, self.buffer)
            self.mode, self.recorder = self.reader.mode if self.is_read else "memory", Recorder()
            yield

    def token(self, number: int) -> Tensor:
        """The products. Pipelined: all operations are read in order, ahead; sequential: each when it is needed."""
        products = []
        with ThreadPoolExecutor(1) as link:
            arrivals = link.map if POLICIES[self.way.policy].overlaps else map
            for run in arrivals(self._read, self.layer.ops.values()):
                operand = self._operand(run)
                with self.recorder.span("compute", run.op, "dram", operand.nbytes, layer=0):
                    products.append(operand.matvec(self.shared.vectors[run.shape[1]]))
        return torch.cat(products)

    def window(self, begun_s: float, ended_s: float) -> Timeline:
        """The stages alone; the time between two of them is not part of a layer."""
        window = super().window(begun_s, ended_s)
        return replace(window, spans=tuple(span for span in window.spans if span.stage != "other"))

    def _read(self, run: OpRun) -> OpRun:
        if self.is_read:
            with self.recorder.span("read", run.op, "storage", run.nbytes, layer=0):
                self.reader.read(run.chunks, self.buffer[run.offset - self.layer.offset :][: run.nbytes])
        return run

    def _operand(self, run: OpRun) -> Packed:
        """The operand of the product: the weight made dense, or as it was stored."""
        packed = self.shared.weights[self.form][run.op]
        if not self.way.stored.decoded_in:
            return packed
        out = self.shared.out(run)
        with self.recorder.span("decode", run.op, "dram", run.dense_bytes, layer=0):
            return unpacked(packed, out)


def _weights(store: Store, form: str, buffer: np.ndarray) -> Mapping[str, Packed]:
    """Each weight as a view of the buffer that it is read into, made once: that takes as long as a small product.

    Making a weight checks it against the contents of its buffer, so the buffer is read first.
    """
    with open_reader(None, store, form) as reader:
        reader.read(store.layer(0, form).chunks, buffer)
    return store.layer(0, form).view(buffer)
