"""Packed layers in memory beside neurons or experts that are read: the head, and of a GGUF file all other linears."""

from collections.abc import Mapping

from torch import nn

from toolkit.models import decoder_blocks
from toolkit.models.head import HEAD, head_parts
from toolkit.offload.device import Cpu
from toolkit.offload.head import replace_head
from toolkit.offload.linear import OffloadedLinear, itself
from toolkit.storage.buffers import aligned_buffer, buffer_bytes
from toolkit.storage.readers import open_reader
from toolkit.storage.runs import Layer
from toolkit.storage.store import Store
from toolkit.storage.tensor_ranges import FileLayer
from toolkit.timeline import Recorder


class HeldLayers:
    """Layers of a store, by number, that are in memory, on the CPU.

    `nbytes` counts them and the scratch in which prompts make one matrix dense.
    """

    def __init__(self, store: Store, layers: Mapping[int, Layer | FileLayer]):
        self._store, self._layers = store, layers
        self._scratch_bytes = max(op.scratch_bytes for layer in layers.values() for op in layer.ops.values())
        self._layer_bytes = sum(layer.nbytes for layer in layers.values())
        self.nbytes = self._scratch_bytes + buffer_bytes(self._layer_bytes)

    def take_over(self, model: nn.Module, recorder: Recorder) -> None:
        """Read the layers and put them in the places of the model's linears."""
        device, arena, parts = Cpu(), aligned_buffer(self._layer_bytes), []
        scratch, blocks, rows = device.empty(self._scratch_bytes), decoder_blocks(model), self._store.head_rows
        heads = dict(enumerate(head_parts(model, rows) if rows else (), len(blocks)))
        with open_reader(None, self._store) as reader:
            for number, layer in self._layers.items():
                mine, arena = arena[: layer.nbytes], arena[layer.nbytes :]
                reader.read(layer.chunks, mine)
                for name, weight in layer.view(mine).items():
                    linear = heads[number] if name == HEAD else blocks[number].get_submodule(name)
                    ours = OffloadedLinear(linear, name, number, itself(weight), scratch, True, recorder, device)
                    if name == HEAD:
                        parts.append(ours)
                    else:
                        blocks[number].set_submodule(name, ours)
        replace_head(model, parts)
