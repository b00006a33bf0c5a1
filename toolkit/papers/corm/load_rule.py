"""Whole expert or active neurons only: from which share of active neurons on does gathering take as long?

That is figure 9 of CORM.

    load_times(ExpertLoads("mixtral-8x7b"))       # measured, tier by tier
    crossings(times)

An expert is one run of neurons at a fixed stride: bundles of 16 bits, or records of few bits. Active ones are drawn at
random. From a disk they are read by direct reads, many under way at once, which may go on over gaps between neurons;
the whole expert is read by the same reader and by threads, and the quicker counts. "decompress" then copies neurons out
of the blocks that were read, row behind row. To a GPU they are gathered first ("compress"), copied, and scattered into
an expert of zeros ("decompress"), as the paper does it. The toolkit's kernels take rows in any order and need no such
expert, so crossings are given with and without decompression. Tier "dram" does all of it in memory, without a link.

The link to a GPU is paced: a real copy in memory, then a wait until a named bandwidth and fixed time are spent. Its
rows are `modelled`, and so is decompression on the GPU: bytes over its memory's bandwidth, zeros written, neurons read
and written. Rows of disk and memory are `measured`.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from toolkit.cache import kept_folder
from toolkit.errors import UserError, unknown
from toolkit.formats.dense import Dense
from toolkit.kernels.neurons.records import ALIGNMENT, record_bytes
from toolkit.machines.machine import GB
from toolkit.measure.contestant import Contestant
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import measured, take_turns
from toolkit.models.architectures import ARCHITECTURES
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.bundles import buffer_bytes, buffered_chunks
from toolkit.storage.readers import open_reader, open_scattered
from toolkit.storage.readers.base import HostReader
from toolkit.storage.runs import Layer
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store
from toolkit.timeline.spans import Recorder

WHOLE, GATHERED = "whole expert", "active neurons"
DISK, DRAM = "disk", "dram"
DECOMPRESSED, AS_THEY_COME = "decompressed", "as they come"
OP = "expert"
WORD = torch.int64  # torch copies rows of bytes one by one
STAGES = {"compress_s": "manage", "load_s": "read", "decompress_s": "decode"}  # columns, and stages of a timeline


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


@dataclass(frozen=True)
class ExpertLoads:
    """The timed object: an expert of a model of `ARCHITECTURES`, by bits of its weights and share of active neurons.

    `gap_bytes`: reads from disk go on over gaps of up to so many bytes. `depth`: reads under way at once.
    """

    model: str
    bits: tuple[int, ...] = (16, 4, 2)
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
    links: tuple[Link, ...] = ()
    gap_bytes: tuple[int, ...] = (0, 65536)
    depth: int = 32
    repetitions: int = 5
    seed: int = 0

    def __post_init__(self):
        """Raise `UserError` for a model without experts, or numbers that cannot be timed."""
        if getattr(ARCHITECTURES.get(self.model), "experts", 0) < 1:
            raise unknown("model with experts", self.model, [n for n, s in ARCHITECTURES.items() if s.experts])
        if not self.shares or min(self.shares) <= 0 or max(self.shares) > 1:
            raise UserError(f"shares of active neurons are {list(self.shares)}; expected above 0, at most 1")
        rates = [rate for link in self.links for rate in (link.gb_s, link.device_gb_s)]
        if self.repetitions < 1 or min(rates, default=1) <= 0:
            raise UserError(f"repetitions={self.repetitions}, links {self.links}: expected at least 1, rates above 0")

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons of an expert, and the hidden size."""
        shape = ARCHITECTURES[self.model]
        return shape.ffn, shape.hidden


def neuron_bytes(hidden: int, bits: int) -> int:
    """The stride of stored neurons. Raises `UserError` for bits other than 16, 4 and 2."""
    return 6 * hidden if bits == 16 else record_bytes(hidden, bits)


@kept_folder("expert_loads")
def expert_store(folder: Path, model: str, bits: tuple[int, ...]) -> None:
    """A store with one expert of random bytes for each number of bits: latency does not depend on values."""
    neurons, hidden = ExpertLoads(model).shape
    generator = torch.Generator().manual_seed(0)

    def ops() -> Iterator[Op]:
        for number in bits:
            shape = neurons, neuron_bytes(hidden, number)
            rows = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
            yield Op(0, OP, variant(number), Dense.encode(rows))

    expected = neurons * sum(neuron_bytes(hidden, number) for number in bits)
    write_store(folder / "store", ops(), model={"name": model}, expected_bytes=expected)


def variant(bits: int) -> str:
    """The store's variant with an expert of so many bits."""
    return f"bits{bits}"


@measured
def load_times(loads: ExpertLoads) -> pd.DataFrame:
    """A row for each tier, number of bits, way and share: seconds of the stages, medians over the repetitions.

    Columns: model, neurons, tier ("disk", "dram", a link's name), bits, stored_bytes (of the whole expert), way
    (`WHOLE`, `GATHERED`), gap_bytes (disk), share, compress_s, load_s, decompress_s, seconds (of all three, with its
    range), mode, disturbed, evidence.

    Tier "dram" gathers and scatters in memory and copies nothing between: it is what compression costs by itself.
    """
    neurons, hidden = loads.shape
    store = Store.open(expert_store(loads.model, loads.bits) / "store")
    generator, tables = np.random.default_rng(loads.seed), []
    with ExitStack() as stack:
        readers = (
            stack.enter_context(open_reader("threads", store)),
            stack.enter_context(open_scattered(store, depth=loads.depth)),
        )
        for bits in loads.bits:
            layer, nbytes = store.layer(0, variant(bits)), neurons * neuron_bytes(hidden, bits)
            racing = [
                Loading(labels | {"bits": bits, "share": share}, mode, nbytes, share, neurons, run, generator)
                for labels, mode, run in _ways(loads, layer, readers, neuron_bytes(hidden, bits))
                for share in ((1.0,) if labels["way"] == WHOLE else loads.shares)
            ]
            labels = list(racing[0].labels)
            turns = by_turn(take_turns(racing, loads.repetitions, warm_up=1), labels)
            tables.append(summary(turns, labels).rename(columns={f"{of}_s": name for name, of in STAGES.items()}))
    columns = [*labels, "stored_bytes", *STAGES, "seconds", "seconds_low", "seconds_high", "mode", "disturbed"]
    return pd.concat(tables, ignore_index=True)[columns].assign(model=loads.model, neurons=neurons)


class Loading(Contestant):
    """One way of getting a share of an expert's neurons. A token is one load, of neurons drawn anew.

    `run` gives the seconds of `STAGES` for some neurons. The clock goes on by these, some of which are modelled.
    """

    def __init__(
        self,
        labels: Mapping[str, object],
        mode: str,
        nbytes: int,
        share: float,
        neurons: int,
        run: Callable[[Int64[np.ndarray, " some"]], list[float]],
        generator: np.random.Generator,
    ):
        self.labels, self.mode, self.nbytes, self.run = labels, mode, nbytes, run
        self.neurons, self.chosen, self.generator = neurons, max(1, round(share * neurons)), generator
        self._clock_s = 0.0
        self.recorder = Recorder(lambda: self._clock_s)

    def token(self, number: int) -> None:
        """One load."""
        ids = np.sort(self.generator.choice(self.neurons, self.chosen, replace=False))
        for stage, seconds in zip(STAGES.values(), self.run(ids), strict=True):
            begun_s = self._clock_s
            self._clock_s += seconds
            self.recorder.record(stage, OP, "storage", begun_s, 0, None)


def _ways(loads: ExpertLoads, layer: Layer, readers: tuple, stride: int) -> Iterator[tuple]:
    """Labels, how it reads, and what runs for chosen neurons and gives the seconds of the stages."""
    _, scattered = readers
    (run,) = layer.ops.values()
    neurons = run.shape[0]
    buffer = aligned_buffer(max(buffer_bytes(layer, neurons, max(loads.gap_bytes)), layer.nbytes))
    rows = torch.from_numpy(aligned_buffer(neurons * stride)).view(WORD).view(neurons, stride // WORD.itemsize)
    rows.random_()
    compact, expert = torch.ones_like(rows), torch.ones_like(rows)  # touched

    def labels(tier: str, way: str, reader: str = "", gap: int = 0, evidence: str = "measured") -> dict[str, object]:
        return {"tier": tier, "way": way, "reader": reader, "gap_bytes": gap, "evidence": evidence}

    def read_whole(reader: HostReader) -> list[float]:
        return [0.0, _timed(lambda: reader.read(layer.ranges, buffer)), 0.0]

    def read_some(ids: Int64[np.ndarray, " some"], gap: int) -> list[float]:
        chunks, places = buffered_chunks(layer, ids, gap)
        load_s = _timed(lambda: scattered.read_chunks(layer.shard, chunks, buffer))
        return [0.0, load_s, _timed(lambda: _copied_out(buffer, places[OP], compact))]

    def gathered(link: Link | None) -> Callable:
        def run(ids: Int64[np.ndarray, " some"]) -> list[float]:
            places, count = torch.from_numpy(ids), len(ids)
            compress_s = _timed(lambda: torch.index_select(rows, 0, places, out=compact[:count]))
            if link is None:
                return [compress_s, 0.0, _timed(lambda: expert.zero_().index_copy_(0, places, compact[:count]))]
            load_s = _timed(lambda: link.copy(compact[:count], arrived[:count]))
            return [compress_s, load_s, link.scatter_s(compact[:count].nbytes, rows.nbytes)]

        return run

    for reader in {each.name: each for each in readers}.values():
        whole = labels(DISK, WHOLE, reader.name)
        yield whole, f"{reader.mode}, {reader.name}", lambda _, reader=reader: read_whole(reader)
    for gap in loads.gap_bytes:
        some = labels(DISK, GATHERED, scattered.name, gap)
        yield some, f"{scattered.mode}, {scattered.name}", lambda ids, gap=gap: read_some(ids, gap)
    arrived = torch.ones_like(rows)
    yield labels(DRAM, WHOLE), "copy", lambda _: [0.0, _timed(lambda: arrived.copy_(rows)), 0.0]
    yield labels(DRAM, GATHERED), "copy", gathered(None)
    for link in loads.links:
        whole = labels(link.name, WHOLE, evidence="modelled")
        yield whole, "paced copy", lambda _, link=link: [0.0, _timed(lambda: link.copy(rows, arrived)), 0.0]
        yield labels(link.name, GATHERED, evidence="modelled"), "paced copy", gathered(link)


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


def crossings(times: pd.DataFrame) -> pd.DataFrame:
    """Up to which share of active neurons gathering is quicker than the whole expert, by tier, bits, gap and use.

    Columns: model, tier, bits, gap_bytes, use ("decompressed", as the paper has it, or "as they come", for kernels that
    take rows in any order), share_limit (linear between the measured shares: 0 where gathering is never quicker, 1
    where it always is), whole_s, evidence. Tier "dram" is left out: nothing is loaded there.
    """
    keys, rows = ["model", "tier", "bits", "evidence"], []
    for of, group in times[times["tier"] != DRAM].groupby(keys, sort=False):
        whole_s = group.loc[group["way"] == WHOLE, "seconds"].min()  # from a disk, of two readers
        for gap, some in group[group["way"] == GATHERED].groupby("gap_bytes"):
            uses = {DECOMPRESSED: some["seconds"], AS_THEY_COME: some["compress_s"] + some["load_s"]}
            for use, seconds in uses.items():
                limit = share_limit(some["share"].to_numpy(), seconds.to_numpy(), whole_s)
                labels = dict(zip(keys, of, strict=True)) | {"gap_bytes": gap, "use": use}
                rows.append(labels | {"share_limit": limit, "whole_s": whole_s})
    return pd.DataFrame(rows)


def limits_by_tier(limits: pd.DataFrame, bits: int, use: str = DECOMPRESSED) -> dict[str, float]:
    """The loading rule of each tier, of one model's `crossings`: the limit with the gap that serves best.

    It takes the place of the paper's 75 % as `limit` of `toolkit.simulation.experts.LoadingInputs`. Raises `UserError`
    for bits or a use that were not timed.
    """
    some = limits[(limits["bits"] == bits) & (limits["use"] == use)]
    if some.empty:
        raise UserError(f"no limit for {bits} bits, {use}: timed were {sorted(set(limits['bits']))}")
    return some.groupby("tier", sort=False)["share_limit"].max().to_dict()


def share_limit(shares: np.ndarray, seconds: np.ndarray, whole_s: float) -> float:
    """The share at which `seconds` first reach `whole_s`; 0 if the first share's do, 1 if none does."""
    order = np.argsort(shares)
    shares, over = shares[order], seconds[order] - whole_s
    if over[0] >= 0:
        return 0.0
    if not (over >= 0).any():
        return 1.0
    after = int(np.argmax(over >= 0))
    before = after - 1
    return float(shares[before] - over[before] * (shares[after] - shares[before]) / (over[after] - over[before]))
