"""The neurons of one layer that are in memory, as LLM in a flash manages them (section 3.3, figure 6).

Rows 0 to `num_used` of a matrix that is allocated once hold them, in any order, since the order of neurons does not
change what an FFN gives. A dropped neuron is overwritten with the last one; a new one is put behind the last.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from toolkit.kernels.engine.rows import move_rows
from toolkit.residency.base import Change, Residency
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.bundles import read_neurons
from toolkit.storage.readers import Reader
from toolkit.storage.runs import Layer
from toolkit.timeline import Recorder

ABSENT = -1


@dataclass(eq=False)
class NeuronReads:
    """Reads neurons of the layer `stored` into rows of memory: the `fetch` of a `NeuronStore`.

    Each read is a span of stage `read`. The time between reads inside `managing` is of stage `manage`. Reads go through
    `buffer`, which layers may share, where rows are no whole blocks. One read brings `most` neurons (None: all), and
    reads over gaps of `gap_bytes` between them.
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
        most = self.most or len(neurons)
        for first in range(0, len(neurons), most):
            part = slice(first, first + most)
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


class NeuronStore:
    """Bundles of neurons in memory: each row is the gate row, if any, the up row and the down column of one neuron.

    `residency` decides which neurons these are. The names are the paper's:

    - `matrix` [rows, width]: the bundles, preallocated, aligned so that direct reads can fill it. Stores that share one
      `clear` before each use.
    - `pointer` [rows]: which neuron each row holds.
    - `bias` [rows]: its bias of the up projection, or None; those of all neurons stay in memory, `all_biases`.
    - `num_used`: rows in use.
    - `rows_moved`: rows that deletions have copied so far. Each deleted neuron moves at most one.

    If `fetch` raises, nothing is held any more, and the next token loads all that it needs.
    """

    def __init__(
        self,
        residency: Residency,
        width: int,
        dtype: torch.dtype,
        fetch: NeuronReads,
        all_biases: Float[Tensor, " neurons"] | None = None,
        matrix: Float[Tensor, "rows width"] | None = None,
    ):
        rows = residency.rows
        self.residency, self.all_biases, self.fetch = residency, all_biases, fetch
        if matrix is None:
            matrix = torch.from_numpy(aligned_buffer(rows * width * dtype.itemsize)).view(dtype).view(rows, width)
        self.matrix = matrix[:rows]
        self.pointer = np.full(rows, ABSENT)
        self.bias = None if all_biases is None else torch.zeros(rows, dtype=all_biases.dtype)
        self.row_of = np.full(residency.units, ABSENT)
        self.num_used = self.rows_moved = self.rows_loaded = 0

    @property
    def used(self) -> tuple[Tensor, Tensor | None]:
        """The rows in use and their biases, in place; good until the next token."""
        return self.matrix[: self.num_used], None if self.bias is None else self.bias[: self.num_used]

    def advance(self, active: Int64[np.ndarray, " active"]) -> Change:
        """Hold what the next token needs, and what the policy keeps. Returns what changed.

        Raises what `Residency.step` and `fetch` raise.
        """
        change = self.residency.step(active)
        try:
            self.delete(change.dropped)
            self.append(change.loaded)
        except BaseException:
            self.clear()
            raise
        return change

    def delete(self, neurons: Int64[np.ndarray, " dropped"]) -> None:
        """Give up the rows of some neurons that are held: the last rows take their places."""
        gone = self.row_of[neurons]
        left = self.num_used - len(gone)
        staying = np.ones(self.num_used, dtype=bool)
        staying[gone] = False
        holes, movers = gone[gone < left], left + np.flatnonzero(staying[left:])
        if len(movers):
            self.pointer[holes] = self.pointer[movers]
            move_rows(self.matrix.view(torch.uint8).numpy(), movers, holes)
            if self.bias is not None:
                self.bias[torch.from_numpy(holes)] = self.bias[torch.from_numpy(movers)]
            self.rows_moved += len(movers)
        self.row_of[neurons] = ABSENT
        self.row_of[self.pointer[holes]] = holes
        self.pointer[left : self.num_used] = ABSENT
        self.num_used = left

    def append(self, neurons: Int64[np.ndarray, " new"]) -> None:
        """Fetch some neurons that are not held into the rows behind the last one."""
        first, end = self.num_used, self.num_used + len(neurons)
        if len(neurons):
            self.fetch(neurons, self.matrix[first:end])
        self.pointer[first:end] = neurons
        self.row_of[neurons] = np.arange(first, end)
        if self.bias is not None:
            self.bias[first:end] = self.all_biases[torch.from_numpy(neurons)]
        self.num_used = end
        self.rows_loaded += len(neurons)

    def clear(self) -> None:
        """Hold nothing."""
        self.residency.clear()
        self.pointer.fill(ABSENT)
        self.row_of.fill(ABSENT)
        self.num_used = 0
