"""Timed passes through one layer of a store: its operations are read, decoded and used, and each step is a span.

    with twin_store({"fc1": (36864, 9216)}, torch.float16, 0.5, ["dense", "endor"]) as store:
        ways = [(Way("dense", device="cpu"), "storage"), (Way("endor", device="cpu"), "storage")]
        for (way, placement), repetition, mode, timeline in timed_passes(store, ways, repetitions=5):
            ...

The layer is a shape-only twin: random weights, since time does not depend on their values. The device is the CPU.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from toolkit import paths
from toolkit.errors import UserError, unknown
from toolkit.files import make_folder, scratch_folder
from toolkit.formats import Packed, encode
from toolkit.formats.scaled import Scaled, unpacked
from toolkit.models.shapes import random_pruned
from toolkit.policies.ways import POLICIES, Placed, Way
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.readers import Reader, open_reader
from toolkit.storage.runs import Layer, OpRun
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store
from toolkit.timeline.spans import Recorder, Timeline

PLACEMENTS = ("storage", "dram")
SCALES_DTYPE = torch.float16  # of int8 twins: ENDOR's models are float16


@contextlib.contextmanager
def twin_store(
    shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, sparsity: float, forms: Sequence[str]
) -> Iterator[Store]:
    """A store of one random layer in these formats on the disk of the cache, removed afterwards. int8 rows have scales.

    Each operation's bytes in each format are read back and checked against the pruned weight. Raises `UserError` if
    one differs, or the disk is too small.
    """
    weights = {op: random_pruned(shape, sparsity, dtype, seed) for seed, (op, shape) in enumerate(shapes.items())}
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        target = folder / "store"
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


def timed_passes(
    store: Store, cases: Sequence[Placed], repetitions: int
) -> Iterator[tuple[Placed, int, str, Timeline]]:
    """Each way `repetitions` times and once before: way, placement, repetition from 0, the reader's mode, timeline.

    A slow spell of the disk hits one repetition of every case, since repetitions are the outer loop. Files are opened
    anew for each pass, which drops what the page cache may hold of them. Raises `UserError` for no repetition or an
    unknown placement.
    """
    if repetitions < 1:
        raise UserError(f"repetitions={repetitions}: expected 1 or more; one more goes before them")
    for _, placement in cases:
        if placement not in PLACEMENTS:
            raise unknown("placement", placement, PLACEMENTS)
    forms = {way.stored.format for way, _ in cases}
    buffers = {form: aligned_buffer(store.slot_bytes(form)) for form in forms}
    largest = max(run.dense_bytes for form in forms for run in store.layer(0, form).ops.values())
    dense = aligned_buffer(largest)
    weights = {form: _weights(store, form, buffers[form]) for form in forms}
    for repetition in range(repetitions + 1):
        for way, placement in cases:
            form = way.stored.format
            with open_reader("threads", store, form) as reader:
                timeline = _pass(way, placement, reader, store.layer(0, form), buffers[form], weights[form], dense)
                yield (way, placement), repetition, reader.mode, timeline


def _weights(store: Store, form: str, buffer: np.ndarray) -> Mapping[str, Packed]:
    """Each weight as a view of the buffer that it is read into, made once: that takes as long as a small product.

    Making a weight checks it against the contents of its buffer, so the buffer is read first.
    """
    with open_reader("threads", store, form) as reader:
        reader.read(store.layer(0, form).ranges, buffer)
    return store.layer(0, form).view(buffer)


def _pass(
    way: Way,
    placement: str,
    reader: Reader,
    layer: Layer,
    buffer: np.ndarray,
    weights: Mapping[str, Packed],
    dense: np.ndarray,
) -> Timeline:
    vectors = {columns: torch.randn(columns) for _, columns in (run.shape for run in layer.ops.values())}
    if placement == "dram":
        reader.read(layer.ranges, buffer)
    recorder = Recorder()

    def read(run: OpRun) -> OpRun:
        if placement == "storage":
            with recorder.span("read", run.op, "storage", run.nbytes, layer=0):
                reader.read(run.ranges, buffer[run.offset - layer.offset :][: run.nbytes])
        return run

    with ThreadPoolExecutor(1) as link:
        arrivals = (
            link.map if POLICIES[way.policy].overlaps else map
        )  # pipelined: all are read in order, ahead; sequential: each when it is needed
        for run in arrivals(read, layer.ops.values()):
            operand = _operand(way, recorder, run, weights[run.op], dense)
            with recorder.span("compute", run.op, "dram", operand.nbytes, layer=0):
                operand.matvec(vectors[run.shape[1]])
    return recorder.timeline()


def _operand(way: Way, recorder: Recorder, run: OpRun, packed: Packed, dense: np.ndarray) -> Packed:
    """The operand of the product: the weight made dense, or as it was stored."""
    if not way.stored.decoded_in:
        return packed
    out = torch.from_numpy(dense[: run.dense_bytes]).view(run.dtype).view(run.shape)
    with recorder.span("decode", run.op, "dram", run.dense_bytes, layer=0):
        return unpacked(packed, out)
