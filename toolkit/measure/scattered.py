"""Scattered neurons read from a twin's bundles, in both layouts, beside fio with the same chunks and depth.

scattered_reads(Scattered("opt-6.7b", layers=4))
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from toolkit.cache import kept
from toolkit.machines.probe import describe
from toolkit.measure import fio
from toolkit.measure.disturbance import Guard, Load
from toolkit.measure.twin_bundles import DTYPE, neuron_shape, twin_bundles
from toolkit.models.shapes import neuron_bytes
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.bundles import LAYOUTS, read_neurons
from toolkit.storage.readers import Reader, open_scattered
from toolkit.storage.store import Store

TOOL, LONG, FIO = "toolkit", "toolkit, long bursts", "fio"
LONG_SHARE = 0.25  # of a layer's neurons: so that a start and an end with few reads under way do not count


@dataclass(frozen=True)
class Scattered:
    """What to read: a share of a layer's neurons at random, again and again for `read_s` in each of the turns."""

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
    size and file without a pause. Turns alternate. There are no rows of fio where it is not installed.
    """
    guard = Guard()
    rows = list(_rows(scattered, guard))
    guard.close()
    return pd.DataFrame([row | {"disturbed": load.disturbed} for row, load in rows])


def _rows(scattered: Scattered, guard: Guard) -> Iterator[tuple[dict, Load]]:
    store, generator = twin_bundles(scattered.model, scattered.layers), np.random.default_rng(scattered.seed)
    with open_scattered(store, *LAYOUTS, depth=scattered.depth) as reader:
        for repetition in range(scattered.repetitions):
            for layout in LAYOUTS:
                chunk = neuron_bytes(scattered.model, DTYPE.itemsize, layout)
                labels = {"layout": layout, "chunk_bytes": chunk, "depth": scattered.depth, "mode": reader.mode}
                labels |= {"model": scattered.model, "repetition": repetition}
                for tool, share in ((TOOL, scattered.share), (LONG, LONG_SHARE)):
                    with guard.turn() as load:
                        gb_s = _ours(replace(scattered, share=share), store, reader, layout, generator)
                    yield labels | {"tool": tool, "gb_s": gb_s}, load
                if fio.installed():
                    file = store.shards[store.layer(0, layout).shard].path
                    with guard.turn() as load:
                        gb_s = fio.random_read_gb_s(file, reader, chunk, scattered.depth, scattered.read_s)
                    yield labels | {"tool": FIO, "gb_s": gb_s}, load


def _ours(scattered: Scattered, store: Store, reader: Reader, layout: str, generator: np.random.Generator) -> float:
    """GB/s over the time that reads took."""
    count, hidden, gated = neuron_shape(scattered.model)
    width, chosen = hidden * (3 if gated else 2), max(1, round(scattered.share * count))
    memory = torch.from_numpy(aligned_buffer(chosen * width * DTYPE.itemsize))
    rows, nothing = memory.view(DTYPE).view(chosen, width), aligned_buffer(0)
    elapsed_s, nbytes, layers = 0.0, 0, store.layers_of(layout)
    while elapsed_s < scattered.read_s:
        neurons = np.sort(generator.choice(count, chosen, replace=False))
        layer = layers[generator.integers(len(layers))]
        begun_s = time.perf_counter()
        read_neurons(reader, layer, neurons, rows, nothing)
        elapsed_s += time.perf_counter() - begun_s
        nbytes += rows.nbytes
    return nbytes / elapsed_s / 1e9
