"""Brings layers into a GPU's memory, the next one while this one is used: from DRAM, or straight from storage.

A thread of its own waits for the disk, unpacks the weights that the CPU must unpack, and copies. So the read of the
next layer goes on while this layer is copied, and both go on while the layer before is used.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.formats import Packed
from toolkit.offload.budget import Budget
from toolkit.offload.cache import Ring
from toolkit.offload.device import Cuda
from toolkit.offload.plan import Plan, forms, largest_bytes, staging_bytes
from toolkit.offload.streamer import Bytes, Streamer
from toolkit.storage.buffers import aligned_buffer, buffer_bytes
from toolkit.storage.readers import Reader
from toolkit.storage.runs import Layer
from toolkit.timeline import Recorder

DeviceBytes = UInt8[Tensor, "_"]


class Uploader(Ring):
    """Gives the weights of one layer after the other in a GPU's memory.

    The plan is of whole layers. Layers in storage come through DRAM, unless there is a `direct` reader into the GPU's
    memory. Raises `UserError` if a budget is too small.
    """

    def __init__(
        self,
        plan: Plan,
        device: Cuda,
        reader: Reader,
        direct: Reader | None,
        budgets: Mapping[str, Budget],
        recorder: Recorder,
    ):
        self.device, self.reader, self.direct, self.recorder = device, reader, direct, recorder
        self._stored, (staying, self._passing) = plan.layers, forms(plan.layers, plan.way)
        self._straight = set(plan.numbers("storage")) if direct is not None else set()
        kept, passing = plan.numbers("device"), plan.numbers("dram", "storage")
        count = min(plan.slots, len(passing))
        slot_bytes = max((self._passing[number].nbytes for number in passing), default=0)
        kept_bytes = sum(staying[number].nbytes for number in kept)
        budgets["device"].take(layers=buffer_bytes(kept_bytes), slots=buffer_bytes(count * slot_bytes))
        self._kept = self._settle({n: staying[n] for n in kept}, device.empty(kept_bytes), budgets["dram"])
        budgets["dram"].take(staging=(staged_bytes := staging_bytes(plan.layers, plan.way) if passing else 0))
        self._staging = device.pinned_buffer(staged_bytes)
        through_dram = plan if direct is None else plan.past_dram()
        self._host = Streamer(through_dram, reader, budgets["dram"], recorder, device.pinned_buffer)
        arena = device.empty(count * slot_bytes)
        self._slots = [arena[number * slot_bytes :][:slot_bytes] for number in range(count)]
        self._link = ThreadPoolExecutor(1, "link")
        super().__init__(passing, count)

    def layer(self, number: int) -> Mapping[str, Packed]:
        """The weights of a layer by op, in place; see `Ring.layer`."""
        return self._kept[number] if number in self._kept else super().layer(number)

    def close(self) -> None:
        """Wait for all that is under way, and release all memory."""
        super().close()
        self._link.shutdown()
        self._host.close()
        self._kept, self._slots, self._staging = {}, [], self._staging[:0].copy()

    def _view(self, number: int, slot: int) -> Mapping[str, Packed]:
        return self._passing[number].view(self._slots[slot])

    def _fetch(self, number: int, slot: int) -> Future:
        """Start to bring a layer. Earlier work may still read the slot's old contents, so a mark is set."""
        return self._link.submit(self._bring, number, self._slots[slot], self.device.mark())

    def _bring(self, number: int, buffer: DeviceBytes, mark: torch.cuda.Event) -> None:
        stored, form = self._stored[number], self._passing[number]
        if number in self._straight:
            mark.synchronize()
            span = self.recorder.span("read", "layer", "storage", stored.nbytes, number)
            self.direct.submit(stored.chunks, buffer, within=span).result()
        elif form is stored:
            content = self._host.content(number)
            mark.synchronize()
            self._copy("layer", number, content, buffer)
        else:
            weights = self._host.layer(number)
            mark.synchronize()
            self._unpack(number, weights, form, buffer, self._staging)

    def _unpack(
        self, number: int, weights: Mapping[str, Packed], form: Layer, target: DeviceBytes, staging: Bytes
    ) -> None:
        """Unpack the matrices of a layer one by one, and copy each to where the dense `form` has it."""
        for name, weight in weights.items():
            run = form.ops[name]
            out = torch.from_numpy(staging[: run.dense_bytes]).view(run.dtype).view(run.shape)
            with self.recorder.span("decode", name, "dram", run.dense_bytes, number):
                weight.stored.unpack_into(out)
            places = {**run.extras, **run.pieces}
            for part, tensor in {**weight.extras, "values": out}.items():
                self._copy(name, number, _bytes(tensor), target[run.offset + places[part].offset :])

    def _copy(self, op: str, number: int, source: Bytes, target: DeviceBytes) -> None:
        with self.recorder.span("copy", op, "dram", source.nbytes, number):
            self.device.copy(source, target[: source.nbytes])

    def _settle(
        self, staying: Mapping[int, Layer], arena: DeviceBytes, dram: Budget
    ) -> dict[int, Mapping[str, Packed]]:
        """Bring the layers that stay, through memory that is released afterwards."""
        bounce_bytes = max((self._stored[number].nbytes for number in staying), default=0)
        dense_bytes = largest_bytes([form for number, form in staying.items() if form is not self._stored[number]])
        dram.check(bounce=buffer_bytes(bounce_bytes) + buffer_bytes(dense_bytes))
        bounce, staging = aligned_buffer(bounce_bytes), aligned_buffer(dense_bytes)
        weights: dict[int, Mapping[str, Packed]] = {}
        self.device.wait()  # work that was launched before may still use the arena's memory
        for number, form in staying.items():
            place, arena = arena[: form.nbytes], arena[form.nbytes :]
            stored = self._stored[number]
            self.reader.read(stored.chunks, bounce)
            if form is stored:
                self._copy("layer", number, bounce[: stored.nbytes], place)
            else:
                self._unpack(number, stored.view(bounce), form, place, staging)
            weights[number] = form.view(place)
        return weights


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.view(-1).view(torch.uint8).numpy()
