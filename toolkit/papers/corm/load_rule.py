"""Whole expert or active neurons only: from which share of active neurons on does gathering take as long?

That is figure 9 of CORM.

    load_times("mixtral-8x7b", bits=(16, 4), shares=(0.2, 0.45, 0.75))       # measured, tier by tier

An expert is one run of neurons at a fixed stride: bundles of 16 bits, or records of few bits. Active ones are drawn at
random. From a disk they are read by direct reads, many under way at once, which may go on over gaps between neurons;
the whole expert is read by the same reader and by threads, and the quicker counts. "decompress" then copies neurons out
of the blocks that were read, row behind row. To a GPU they are gathered first ("compress"), copied, and scattered into
an expert of zeros ("decompress"), as the paper does it. The toolkit's kernels take rows in any order and need no such
expert. Tier "dram" does all of it in memory, without a link.

The link to a GPU is paced: a real copy in memory, then a wait until a named bandwidth and fixed time are spent. Its
rows are `modelled`, and so is decompression on the GPU: bytes over its memory's bandwidth, zeros written, neurons read
and written. Rows of disk and memory are `measured`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from toolkit.cache import kept_folder
from toolkit.formats.dense import Dense
from toolkit.kernels.neurons.records import ALIGNMENT, record_bytes
from toolkit.machines.machine import GB
from toolkit.measure.contestant import Contestant
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import measured, take_turns
from toolkit.models.architectures import ARCHITECTURES
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.bundles import buffer_bytes, buffered_chunks
from toolkit.storage.readers import Reader, open_reader
from toolkit.storage.runs import Layer
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store
from toolkit.timeline import ReportedTime

WHOLE, GATHERED = "whole expert", "active neurons"
DISK, DRAM = "disk", "dram"
OP = "expert"
WORD = torch.int64  # torch copies rows of bytes one by one
GAPS = (0, 65536)  # bytes between neurons over which reads from disk go on
DEPTH = 32  # reads from disk under way at once
STAGES = {"compress_s": "manage", "load_s": "read", "decompress_s": "decode"}  # columns, and stages of a timeline

Labels = Mapping[str, Any]
Ids = Int64[np.ndarray, " some"]
Run = Callable[[Ids], list[float]]


@dataclass(frozen=True)
class Link:
    """The time of a paced copy: `fixed_s`, and its bytes at `gb_s` GB a second; `device_gb_s` is the GPU's memory's."""

    name: str
    gb_s: float
    fixed_s: float = 0.0
    device_gb_s: float = 1000.0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy, and wait until the link would have ended. A copy that takes longer is not waited for."""
        end_s = time.perf_counter() + self.fixed_s + source.nbytes / (self.gb_s * GB)
        target.copy_(source)
        while time.perf_counter() < end_s:
            pass

    def scatter_s(self, active_bytes: int, whole_bytes: int) -> float:
        """Seconds in which the GPU writes zeros, and reads and writes the active neurons."""
        return (whole_bytes + 2 * active_bytes) / (self.device_gb_s * GB)


def neuron_bytes(hidden: int, bits: int) -> int:
    """The stride of stored neurons. Raises `UserError` for bits other than 16, 4 and 2."""
    return 6 * hidden if bits == 16 else record_bytes(hidden, bits)


@kept_folder("expert_loads")
def expert_store(folder: Path, model: str, bits: Sequence[int]) -> None:
    """A store with one expert of random bytes for each number of bits: latency does not depend on values."""
    shape, generator = ARCHITECTURES[model], torch.Generator().manual_seed(0)
    sizes = {number: (shape.ffn, neuron_bytes(shape.hidden, number)) for number in bits}

    def ops() -> Iterator[Op]:
        for number, size in sizes.items():
            rows = torch.randint(-128, 128, size, dtype=torch.int8, generator=generator)
            yield Op(0, OP, f"bits{number}", Dense.encode(rows))

    expected = sum(neurons * stride for neurons, stride in sizes.values())
    write_store(folder / "store", ops(), model={"name": model}, expected_bytes=expected)


@measured
def load_times(
    model: str, bits: Sequence[int], shares: Sequence[float], links: Sequence[Link] = (), repetitions: int = 5
) -> pd.DataFrame:
    """A row for each tier, number of bits, way and share of active neurons: seconds of the stages, medians over turns.

    Columns: model, neurons, tier ("disk", "dram", a link's name), bits, stored_bytes (of the whole expert), way
    (`WHOLE`, `GATHERED`), gap_bytes (disk), share, compress_s, load_s, decompress_s, seconds (of all three, with its
    range), mode, disturbed, evidence.

    Tier "dram" gathers and scatters in memory and copies nothing between: it is what compression costs by itself.
    """
    store = Store.open(expert_store(model, bits) / "store")
    generator, tables = np.random.default_rng(0), []
    with ExitStack() as stack:
        whole = stack.enter_context(open_reader(None, store))
        scattered = stack.enter_context(open_reader(None, store, depth=DEPTH))
        for number in bits:
            expert = store.layer(0, f"bits{number}")
            racing = [
                Loading(labels | {"bits": number, "share": share}, mode, run, expert, generator)
                for labels, mode, run in _ways(expert, whole, scattered, links)
                for share in ((1.0,) if labels["way"] == WHOLE else shares)
            ]
            labels = list(racing[0].labels)
            turns = by_turn(take_turns(racing, repetitions, warm_up=1), labels)
            tables.append(summary(turns, labels).rename(columns={f"{of}_s": name for name, of in STAGES.items()}))
    columns = [*labels, "stored_bytes", *STAGES, "seconds", "seconds_low", "seconds_high", "mode", "disturbed"]
    return pd.concat(tables, ignore_index=True)[columns].assign(model=model, neurons=ARCHITECTURES[model].ffn)


class Loading(Contestant):
    """One way of getting a share of an expert's neurons. A token is one load, of neurons drawn anew.

    `run` gives the seconds of `STAGES` for some neurons. The clock goes on by these, some of which are modelled.
    """

    def __init__(self, labels: Labels, mode: str, run: Run, expert: Layer, generator: np.random.Generator):
        self.labels, self.mode, self.run, self.generator = labels, mode, run, generator
        ((self.neurons, stride),) = (stored.shape for stored in expert.ops.values())
        self.nbytes = self.neurons * stride
        self.chosen = max(1, round(labels["share"] * self.neurons))
        self.recorder = ReportedTime()

    def token(self, number: int) -> None:
        """One load."""
        ids = np.sort(self.generator.choice(self.neurons, self.chosen, replace=False))
        for stage, seconds in zip(STAGES.values(), self.run(ids), strict=True):
            self.recorder.report(stage, OP, "storage", seconds)


def _ways(layer: Layer, threads: Reader, scattered: Reader, links: Sequence[Link]) -> Iterator[tuple[Labels, str, Run]]:
    """Labels, how it reads, and a function that gets chosen neurons and gives the seconds of the stages."""
    (stored,) = layer.ops.values()
    neurons, stride = stored.shape
    buffer = aligned_buffer(max(buffer_bytes(layer, neurons, max(GAPS)), layer.nbytes))
    rows = torch.from_numpy(aligned_buffer(neurons * stride)).view(WORD).view(neurons, stride // WORD.itemsize)
    rows.random_()
    compact, arrived, expert = (torch.ones_like(rows) for _ in range(3))  # touched

    def labels(tier: str, way: str, reader: str = "", gap: int = 0, evidence: str = "measured") -> Labels:
        return {"tier": tier, "way": way, "reader": reader, "gap_bytes": gap, "evidence": evidence}

    def whole(work: Callable[[], object]) -> Run:
        return lambda _: [0.0, _timed(work), 0.0]

    def read_some(gap: int, ids: Ids) -> list[float]:
        chunks, places = buffered_chunks(layer, ids, gap)
        load_s = _timed(lambda: scattered.read([chunks], buffer))
        return [0.0, load_s, _timed(lambda: _copied_out(buffer, places[OP], compact))]

    def gather(link: Link | None, ids: Ids) -> list[float]:
        places, some = torch.from_numpy(ids), compact[: len(ids)]
        compress_s = _timed(lambda: torch.index_select(rows, 0, places, out=some))
        if link is None:
            return [compress_s, 0.0, _timed(lambda: expert.zero_().index_copy_(0, places, some))]
        load_s = _timed(lambda: link.copy(some, arrived[: len(ids)]))
        return [compress_s, load_s, link.scatter_s(some.nbytes, rows.nbytes)]

    for reader in {each.name: each for each in (threads, scattered)}.values():
        work = partial(reader.read, layer.chunks, buffer)
        yield labels(DISK, WHOLE, reader.name), f"{reader.mode}, {reader.name}", whole(work)
    for gap in GAPS:
        mode = f"{scattered.mode}, {scattered.name}"
        yield labels(DISK, GATHERED, scattered.name, gap), mode, partial(read_some, gap)
    yield labels(DRAM, WHOLE), "copy", whole(partial(arrived.copy_, rows))
    yield labels(DRAM, GATHERED), "copy", partial(gather, None)
    for link in links:
        yield labels(link.name, WHOLE, evidence="modelled"), "paced copy", whole(partial(link.copy, rows, arrived))
        yield labels(link.name, GATHERED, evidence="modelled"), "paced copy", partial(gather, link)


def _copied_out(buffer: UInt8[np.ndarray, " bytes"], places: Int64[np.ndarray, " some"], rows: Tensor) -> None:
    """Copy the neurons that begin at these places of the buffer, each a multiple of 64 bytes, row behind row."""
    words, step = rows.shape[1], ALIGNMENT // WORD.itemsize
    given = torch.from_numpy(buffer).view(WORD)
    windows = given.as_strided(((len(given) - words) // step + 1, words), (step, 1))
    torch.index_select(windows, 0, torch.from_numpy(places // ALIGNMENT), out=rows[: len(places)])


def _timed(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s
