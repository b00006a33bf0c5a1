"""Brings layers into a GPU's memory, the next one while this one is used: from DRAM, or straight from storage.

A thread of its own waits for the disk, unpacks what the CPU is to unpack, and copies; so the next layer's read goes on
while this layer is copied, and both while the one before is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.formats import Packed
from toolkit.formats.dense import Dense
from toolkit.formats.scaled import Scaled
from toolkit.offload.budget import Budget
from toolkit.offload.device import Cuda
from toolkit.offload.ring import Ring
from toolkit.offload.streamer import Bytes, Streamer
from toolkit.offload.weights import unpack
from toolkit.policies.methods import Method
from toolkit.policies.ways import POLICIES
from toolkit.storage.buffers import aligned_buffer, buffer_bytes
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers import Reader
from toolkit.storage.runs import Layer, OpRun
from toolkit.storage.store import Store
from toolkit.timeline.spans import Recorder

DeviceBytes = UInt8[Tensor, "_"]


class Form(Protocol):
    """What a layer looks like in a buffer: a `Layer` as it is stored, or `Unpacked`."""

    nbytes: int

    def view(self, buffer: DeviceBytes) -> Mapping[str, Packed | Scaled]:
        """Each op's weight, in place."""


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A layer made dense: its matrices one after the other."""

    layer: Layer

    @cached_property
    def places(self) -> dict[str, tuple[slice, slice]]:
        """The bytes of each op's matrix, and of the scales behind it, which are none unless it is of integers."""
        found, end = {}, 0
        for name, run in self.layer.ops.items():
            values = slice(end, end + run.dense_bytes)
            scales_bytes = run.shape[0] * run.scales_dtype.itemsize if run.scales_dtype else 0
            scales = slice(_blocks(values.stop), _blocks(values.stop) + scales_bytes)
            found[name], end = (values, scales), _blocks(scales.stop)
        return found

    @property
    def nbytes(self) -> int:
        """Of all matrices and their scales, each in whole blocks."""
        return max(_blocks(scales.stop) for _, scales in self.places.values())

    def view(self, buffer: DeviceBytes) -> dict[str, Packed | Scaled]:
        """Each op's matrix, in place."""
        return {name: self._weight(run, *self.places[name], buffer) for name, run in self.layer.ops.items()}

    def _weight(self, run: OpRun, values: slice, scales: slice, buffer: DeviceBytes) -> Packed | Scaled:
        dense = Dense(run.shape, buffer[values].view(run.dtype).view(run.shape))
        return Scaled(dense, buffer[scales].view(run.scales_dtype)) if run.scales_dtype else dense


def forms(stored: Sequence[Layer], method: Method) -> tuple[Sequence[Form], Sequence[Form]]:
    """How each layer looks in a GPU's memory: if it stays there, and if it passes through.

    What stays is dense, unless it is used packed; what passes is dense, too, if the CPU unpacks it.
    """
    dense = [Unpacked(layer) for layer in stored]
    return dense if method.decoded_in else stored, dense if method.decoded_in == "dram" else stored


def staging_bytes(stored: Sequence[Layer], method: Method) -> int:
    """Pinned memory that the CPU unpacks matrices into on their way, if it does: the largest, in whole huge pages."""
    return buffer_bytes(_largest(stored)) if method.decoded_in == "dram" else 0


class Uploader:
    """Gives the weights of one layer after the other, in a GPU's memory: `layer` is as that of a `Streamer`.

    `tiers` says of each layer whether it stays on the "device" or comes from "dram" or "storage" each time. Those in
    storage come by way of DRAM, unless there is a `direct` reader, into the GPU's memory.
    Raises `UserError` if a budget is too small.
    """

    def __init__(
        self,
        store: Store,
        method: Method,
        tiers: Sequence[str],
        device: Cuda,
        reader: Reader,
        direct: Reader | None,
        policy: str,
        budgets: Mapping[str, Budget],
        recorder: Recorder,
    ):
        self.tiers, self.device, self.reader, self.direct, self.recorder = tiers, device, reader, direct, recorder
        self._stored = store.layers_of(method.format)
        staying, self._passing = forms(self._stored, method)
        kept, passing = ([n for n, tier in enumerate(tiers) if (tier == "device") == stays] for stays in (True, False))
        count = min(POLICIES[policy].slots, len(passing))
        slot_bytes = max((self._passing[number].nbytes for number in passing), default=0)
        kept_bytes = sum(staying[number].nbytes for number in kept)
        budgets["device"].take(layers=buffer_bytes(kept_bytes), slots=buffer_bytes(count * slot_bytes))
        self._kept = self._settle({n: staying[n] for n in kept}, device.empty(kept_bytes), budgets["dram"])
        budgets["dram"].take(staging=(staged_bytes := staging_bytes(self._stored, method) if passing else 0))
        self._staging = device.pinned_buffer(staged_bytes)
        by_host = [tier if direct is None or tier != "storage" else "device" for tier in tiers]
        dram = budgets["dram"]
        self._host = Streamer(store, method.format, by_host, reader, policy, dram, recorder, device.pinned_buffer)
        arena = device.empty(count * slot_bytes)
        slots = [arena[number * slot_bytes :][:slot_bytes] for number in range(count)]
        self._link = ThreadPoolExecutor(1, "link")
        self._ring = Ring(passing, slots, self._fetch, lambda number, buffer: self._passing[number].view(buffer))

    def layer(self, number: int) -> Mapping[str, Packed | Scaled]:
        """The weights of a layer by op, in place: they change with the next call for another layer.

        Raises what reading raises; the layer can be asked for again then.
        """
        return self._kept[number] if number in self._kept else self._ring.layer(number)

    def close(self) -> None:
        """Wait for what is under way, and let go of all memory."""
        self._ring.close()
        self._link.shutdown()
        self._host.close()
        self._kept, self._staging = {}, self._staging[:0].copy()

    def __enter__(self) -> Self:
        """The uploader itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _fetch(self, number: int, buffer: DeviceBytes) -> Future:
        """All that was launched so far may still read what the buffer holds now: it is waited for."""
        return self._link.submit(self._bring, number, buffer, self.device.mark())

    def _bring(self, number: int, buffer: DeviceBytes, mark: torch.cuda.Event) -> None:
        if self.direct is not None and self.tiers[number] == "storage":
            mark.synchronize()
            with self.recorder.span("read", "layer", "storage", self._stored[number].nbytes, number):
                self.direct.read([self._stored[number]], buffer)
            return
        form = self._passing[number]
        if isinstance(form, Unpacked):
            weights = self._host.layer(number)
            mark.synchronize()
            self._unpack(number, weights, form, buffer, self._staging)
        else:
            content = self._host.content(number)
            mark.synchronize()
            self._copy("layer", number, content, buffer)

    def _unpack(
        self, number: int, weights: Mapping[str, Packed | Scaled], form: Unpacked, target: DeviceBytes, staging: Bytes
    ) -> None:
        """Copy a layer from DRAM matrix by matrix, as each is unpacked."""
        for name, packed in weights.items():
            run = self._stored[number].ops[name]
            out = torch.from_numpy(staging[: run.dense_bytes]).view(run.dtype).view(run.shape)
            with self.recorder.span("decode", name, "dram", run.dense_bytes, number):
                found = unpack(packed, out)
            values, scales = form.places[name]
            if isinstance(found, Scaled):
                self._copy(name, number, _bytes(found.scales), target[scales])
                found = found.packed.values
            self._copy(name, number, _bytes(found), target[values])

    def _copy(self, op: str, number: int, source: Bytes, target: DeviceBytes) -> None:
        with self.recorder.span("copy", op, "dram", source.nbytes, number):
            self.device.copy(source, target[: source.nbytes])

    def _settle(
        self, staying: Mapping[int, Form], arena: DeviceBytes, dram: Budget
    ) -> dict[int, Mapping[str, Packed | Scaled]]:
        """Layers that stay, by way of memory that is let go of again."""
        bounce_bytes = max((self._stored[number].nbytes for number in staying), default=0)
        unpacked = [self._stored[number] for number, form in staying.items() if isinstance(form, Unpacked)]
        dense_bytes = _largest(unpacked)
        dram.check(bounce=buffer_bytes(bounce_bytes) + buffer_bytes(dense_bytes))
        bounce, staging, found = aligned_buffer(bounce_bytes), aligned_buffer(dense_bytes), {}
        self.device.wait()  # the arena may be memory that work launched before still uses
        for number, form in staying.items():
            place, arena = arena[: form.nbytes], arena[form.nbytes :]
            stored = self._stored[number]
            self.reader.read([stored], bounce)
            if isinstance(form, Unpacked):
                self._unpack(number, stored.view(bounce), form, place, staging)
            else:
                self._copy("layer", number, bounce[: stored.nbytes], place)
            found[number] = form.view(place)
        return found


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.view(-1).view(torch.uint8).numpy()


def _largest(layers: Iterable[Layer]) -> int:
    """Bytes of the largest matrix of these layers, when dense."""
    return max((run.dense_bytes for layer in layers for run in layer.ops.values()), default=0)


def _blocks(nbytes: int) -> int:
    """Whole blocks, so that what comes after can be read into directly, too."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
