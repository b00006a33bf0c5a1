"""Scattered neurons read from a twin's bundles, in both layouts, beside fio with the same chunks and depth.

scattered_reads(Scattered("opt-6.7b", layers=4))
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from toolkit.cache import kept
from toolkit.machines.probe import describe
from toolkit.measure import fio
from toolkit.measure.contestant import Contestant
from toolkit.measure.summary import by_turn
from toolkit.measure.turns import take_turns
from toolkit.models.shapes import neuron_bytes
from toolkit.papers.flash.twin_bundles import DTYPE, neuron_shape, twin_bundles
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.bundles import LAYOUTS, read_neurons
from toolkit.storage.readers import Reader, open_scattered
from toolkit.storage.store import Store
from toolkit.timeline.spans import Recorder

TOOL, LONG, FIO = "toolkit", "toolkit, long bursts", "fio"
LONG_SHARE = 0.25  # of a layer's neurons: so that a start and an end with few reads under way do not count


@dataclass(frozen=True)
class Scattered:
    """The reads: a share of a layer's neurons at random, again and again for `read_s` in each of the turns."""

    model: str
    layers: int
    share: float = 0.024
    depth: int = 32  # reads under way at once
    read_s: float = 0.4
    repetitions: int = 5
    seed: int = 0


@kept("scattered", key=lambda: {"machine": describe(), "fio": fio.installed()})
def scattered_reads(scattered: Scattered) -> pd.DataFrame:
    """A row for each tool (`TOOL`, `LONG`, `FIO`), layout and repetition: chunk_bytes, depth, mode, gb_s, disturbed.

    Ours reads bursts, one layer's neurons at a time, then `LONG_SHARE` of a layer; fio reads chunks of the same
    size and file without a pause. They take turns. There are no rows of fio where it is not installed.
    """
    store, generator = twin_bundles(scattered.model, scattered.layers), np.random.default_rng(scattered.seed)
    with open_scattered(store, *LAYOUTS, depth=scattered.depth) as reader:
        racing: list[Contestant] = []
        for layout in LAYOUTS:
            racing += [
                Bursts(replace(scattered, share=share), tool, layout, store, reader, generator)
                for tool, share in ((TOOL, scattered.share), (LONG, LONG_SHARE))
            ]
            racing += [Fio(scattered, layout, store, reader)] if fio.installed() else []
        spans = take_turns(racing, scattered.repetitions)
    labels = list(racing[0].labels)
    turns = by_turn(spans, labels)
    gb_s = turns["read_bytes"] / turns["read_s"] / 1e9
    return turns[[*labels, "repetition", "mode", "disturbed"]].assign(gb_s=gb_s)


def _labels(scattered: Scattered, tool: str, layout: str) -> dict[str, object]:
    chunk = neuron_bytes(scattered.model, DTYPE.itemsize, layout)
    return {"model": scattered.model, "tool": tool, "layout": layout, "chunk_bytes": chunk, "depth": scattered.depth}


class Bursts(Contestant):
    """Our reader: bursts of a layer's neurons, straight into the rows of a matrix, for `read_s` seconds of reading."""

    def __init__(
        self,
        scattered: Scattered,
        tool: str,
        layout: str,
        store: Store,
        reader: Reader,
        generator: np.random.Generator,
    ):
        self.name, self.labels, self.mode = tool, _labels(scattered, tool, layout), reader.mode
        self.count, hidden, gated = neuron_shape(scattered.model)
        chosen, width = max(1, round(scattered.share * self.count)), hidden * (3 if gated else 2)
        self.rows = torch.from_numpy(aligned_buffer(chosen * width * DTYPE.itemsize)).view(DTYPE).view(chosen, width)
        self.layers, self.reader, self.generator = store.layers_of(layout), reader, generator
        self.read_s, self.nothing, self.recorder = scattered.read_s, aligned_buffer(0), Recorder()

    def token(self, number: int) -> None:
        """Bursts, each of another layer's neurons, which are drawn between two bursts."""
        read_s = 0.0
        while read_s < self.read_s:
            neurons = np.sort(self.generator.choice(self.count, len(self.rows), replace=False))
            layer, begun_s = self.layers[self.generator.integers(len(self.layers))], self.now_s()
            read_neurons(self.reader, layer, neurons, self.rows, self.nothing)
            self.recorder.record("read", "neurons", "storage", begun_s, self.rows.nbytes, None)
            read_s += self.now_s() - begun_s


class Fio(Contestant):
    """fio, with chunks and reads under way as ours, by the same interface: asynchronous I/O, or a thread a read.

    Its clock is fio's own, which leaves its start out.
    """

    name = FIO

    def __init__(self, scattered: Scattered, layout: str, store: Store, reader: Reader):
        self.labels, self.mode = _labels(scattered, FIO, layout), reader.mode
        self.file, self.read_s = store.shards[store.layer(0, layout).shard].path, scattered.read_s
        self.words = {"rw": "randread", "bs": self.labels["chunk_bytes"], "time_based": 1}
        self.words |= {"runtime": f"{1000 * scattered.read_s:.0f}ms"}
        threads = {"ioengine": "psync", "numjobs": scattered.depth}
        self.words |= {"ioengine": "libaio", "iodepth": scattered.depth} if reader.name == "aio" else threads
        self._clock_s = 0.0
        self.recorder = Recorder(lambda: self._clock_s)

    def token(self, number: int) -> None:
        """One run."""
        nbytes, begun_s = round(1e9 * self.read_s * fio.read_gb_s(self.file, self.mode, self.words)), self._clock_s
        self._clock_s += self.read_s
        self.recorder.record("read", "chunks", "storage", begun_s, nbytes, None)
