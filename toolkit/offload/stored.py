"""A packed folder as an ordinary dense model, whose blocks are decoded when they are used.

model = stored_model(Store.open(folder), "endor")
"""

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn

from toolkit.formats import Packed, decode
from toolkit.models import decoder_blocks
from toolkit.models.cutting import cut_for_good
from toolkit.models.head import HEAD
from toolkit.models.on_demand import TensorSource, block_prefixes, on_demand
from toolkit.models.skeleton import check_outline, compute_buffers
from toolkit.storage import experts, neuron_packing
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.packing import Layout, Linears
from toolkit.storage.readers import open_reader
from toolkit.storage.store import Store

LAYOUTS: dict[str, Layout] = {neuron_packing.LAYOUT: neuron_packing.Neurons(), experts.LAYOUT: experts.WholeExperts()}


def stored_model(store: Store, variant: str) -> nn.Module:
    """The model, in evaluation mode and without gradients. Raises `UserError` as `check_outline` does."""
    source = StoredSource(store, variant)
    model = copy.deepcopy(source.outline)
    compute_buffers(model)
    on_demand(model, source).eval().requires_grad_(False)
    cut_for_good(model)
    return model


class StoredSource(TensorSource):
    """The tensors of a store, decoded."""

    def __init__(self, store: Store, variant: str):
        self.outline = check_outline(store.config(), lambda outline: None)
        self._store, self._variant = store, variant
        self._prefixes = [f"{prefix}." for prefix in block_prefixes(self.outline)]
        head = self.outline.get_output_embeddings()
        self._head = next((f"{name}.weight" for name, module in self.outline.named_modules() if module is head), "")
        self._beside = {run.name for run in store.index.rest}

    @torch.no_grad()
    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """These tensors."""
        number = next((n for n, at in enumerate(self._prefixes) if next(iter(names), "").startswith(at)), None)
        if number is None:
            return {name: self._store.tensor(name) for name in names}
        prefix, block = (
            self._prefixes[number],
            copy.deepcopy(decoder_blocks(self.outline)[number]).to_empty(device="cpu"),
        )
        tensors = block.state_dict()
        for name in names:
            if name in self._beside:
                tensors[name.removeprefix(prefix)].copy_(self._store.tensor(name))
        if (number, self._variant) in self._store.layers:
            self._fill(block, number)
        return {name: tensors[name.removeprefix(prefix)] for name in names}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a matrix beside the blocks, or of a packed head."""
        if name in self._beside:
            return self._store.rows(name, start, stop)
        step, blocks = self._store.head_rows, len(self._prefixes)
        first, last = start // step, (stop - 1) // step
        layers = [packed_layer(self._store, blocks + part, self._variant)[HEAD] for part in range(first, last + 1)]
        return torch.cat([decode(packed) for packed in layers])[start - first * step : stop - first * step]

    def _fill(self, block: nn.Module, number: int) -> None:
        layout, runs = LAYOUTS.get(self._variant, Linears()), self._store.layer(number, self._variant).ops
        for name, packed in packed_layer(self._store, number, self._variant).items():
            for weight, values in layout.pairs(block, runs[name], packed):
                weight.copy_(values)


def packed_layer(store: Store, number: int, variant: str) -> dict[str, Packed]:
    """The packed weights of a layer, read from the disk."""
    layer = store.layer(number, variant)
    slot = aligned_buffer(layer.nbytes)
    shards = [part.shard for part in layer.chunks]  # opening all takes longer than reading one
    with open_reader(None, store, variant, shards=shards) as reader:
        reader.read(layer.chunks, slot)
    return layer.view(slot)
