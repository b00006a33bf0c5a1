"""The time of a token for the neurons of one layer: reads from the disk, and bookkeeping around them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from toolkit.storage.bundles import read_neurons
from toolkit.storage.readers import Reader
from toolkit.storage.runs import Layer
from toolkit.timeline import Recorder


@dataclass(eq=False)
class NeuronReads:
    """Reads neurons into rows of memory: the `fetch` of a `NeuronStore`.

    Each read is a span of stage `read`. The time between reads inside `managing` is of stage `manage`.

    Args:
        stored: the layer on disk, by neuron.
        layer: its number.
        reader: of the files.
        buffer: what reads go through where rows are no whole blocks; layers may share it.
        recorder: takes the spans.
        most: neurons that one read brings; None brings all at once.
        gap_bytes: between neurons that are read over, since a request more would take longer.
    """

    stored: Layer
    layer: int
    reader: Reader
    buffer: UInt8[np.ndarray, " bytes"]
    recorder: Recorder
    most: int | None = None
    gap_bytes: int = 0
    _since_s: float = field(default=0.0, init=False)

    def __call__(self, neurons: Int64[np.ndarray, " new"], rows: Float[Tensor, "new width"]) -> None:
        """Read the weights of some neurons, which rise. Raises what `read_neurons` raises."""
        neuron_bytes = self.stored.nbytes // next(iter(self.stored.ops.values())).shape[0]
        self._managed()
        for first in range(0, len(neurons), self.most or len(neurons)):
            part = slice(first, first + (self.most or len(neurons)))
            begun_s = self.recorder.now_s()
            read_neurons(self.reader, self.stored, neurons[part], rows[part], self.buffer, self.gap_bytes)
            nbytes = len(neurons[part]) * neuron_bytes
            self.recorder.record("read", "neurons", "storage", begun_s, nbytes, self.layer)
        self._since_s = self.recorder.now_s()

    @contextmanager
    def managing(self) -> Iterator[None]:
        """In the block, time without a read is management."""
        self._since_s = self.recorder.now_s()
        yield
        self._managed()

    def _managed(self) -> None:
        self.recorder.record("manage", "neurons", "dram", self._since_s, 0, self.layer)
