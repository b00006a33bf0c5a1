"""An output head in packed parts: streamed as layers are, or in memory beside neurons or experts."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit.formats import Packed
from toolkit.models.blocks import replace_module
from toolkit.models.head import HEAD, head_parts
from toolkit.offload.device import Cpu
from toolkit.offload.linear import OffloadedLinear, itself
from toolkit.storage.buffers import aligned_buffer, buffer_bytes
from toolkit.storage.readers import open_reader
from toolkit.storage.readers.base import Reader
from toolkit.storage.runs import Layer
from toolkit.storage.store import Store
from toolkit.timeline import Recorder


class OffloadedHead(nn.Module):
    """Takes the place of the head. Its parts give the logits of their words, one part after the other.

    `staying` says of each part whether it stays in memory.
    """

    def __init__(self, parts: Sequence[OffloadedLinear], staying: Sequence[bool], dtype: torch.dtype):
        super().__init__()
        self.parts, self._staying = nn.ModuleList(parts), staying
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)
        self.bias = parts[0].bias  # of the first part; None if there is none
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """A tensor without memory, for a model that asks for the shape or the type of its head."""
        return torch.empty(self.out_features, self.in_features, dtype=self._dtype, device="meta")

    def stretches(self) -> Iterator[list[OffloadedLinear]]:
        """The parts whose weights are there at once: neighbours that stay, and each that passes by itself."""
        for stays, each in groupby(zip(self.parts, self._staying, strict=True), key=itemgetter(1)):
            parts = [part for part, _ in each]
            yield from [parts] if stays else ([part] for part in parts)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch words"]:
        """The logits, as each part gives them."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


class HeldHead:
    """The packed head of a folder of neurons or experts: all its parts are in memory, on the CPU.

    `nbytes` counts the parts and the scratch in which prompts make one part dense.
    """

    def __init__(self, store: Store, variant: str, rows: int):
        self._store, self._variant, self._rows = store, variant, rows
        layers = {number: layer for (number, found), layer in store.layers.items() if found == variant}
        self._parts = {number: layer for number, layer in sorted(layers.items()) if HEAD in layer.ops}
        self._scratch_bytes = max(part.ops[HEAD].scratch_bytes for part in self._parts.values())
        self.nbytes = self._scratch_bytes + sum(buffer_bytes(part.nbytes) for part in self._parts.values())

    def take_over(self, model: nn.Module, recorder: Recorder) -> None:
        """Read the parts and put them in the place of the model's head."""
        device, parts = Cpu(), []
        scratch = device.empty(self._scratch_bytes)
        with open_reader(None, self._store, self._variant) as reader:
            for (number, stored), linear in zip(self._parts.items(), head_parts(model, self._rows), strict=True):
                fetch = itself(self._read(reader, stored))
                parts.append(OffloadedLinear(linear, HEAD, number, fetch, scratch, True, recorder, device))
        replace_head(model, parts, [True] * len(parts))

    @staticmethod
    def _read(reader: Reader, part: Layer) -> Packed:
        buffer = aligned_buffer(part.nbytes)
        reader.read(part.chunks, buffer)
        return part.view(buffer)[HEAD]


def replace_head(model: nn.Module, parts: Sequence[OffloadedLinear], staying: Sequence[bool]) -> None:
    """Put parts in the place of a model's head; see `OffloadedHead`."""
    head = model.get_output_embeddings()
    replace_module(model, head, OffloadedHead(parts, staying, head.weight.dtype))
