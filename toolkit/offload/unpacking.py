"""A packed model as an ordinary dense one in memory."""

import torch
from torch import nn

from toolkit.formats import decode
from toolkit.models.head import HEAD, linears_by_layer
from toolkit.offload.strategy import skeleton
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.readers import open_reader
from toolkit.storage.store import Store


def unpack_model(store: Store, variant: str) -> nn.Module:
    """The model that a store holds, in evaluation mode and without gradients; its packed weights are decoded.

    Raises `FormatError` for a damaged store, and `UserError` for one of another model.
    """
    store.verify(variant)
    model = skeleton(store, lambda outline: store.check_fits(outline, variant))
    model.load_state_dict(dict(store.rest()), strict=False, assign=True)
    slot = aligned_buffer(store.slot_bytes(variant))
    with open_reader("threads", store, variant) as reader:
        every = linears_by_layer(model, store.head_rows)
        for layer, linears in zip(store.layers_of(variant), every, strict=True):
            reader.read(layer.chunks, slot)
            for op, packed in layer.view(slot).items():
                linears[op].weight = nn.Parameter(torch.empty(packed.shape, dtype=packed.dtype), requires_grad=False)
                linears[op].weight.data.copy_(decode(packed))
    if parts := [linears[HEAD].weight for linears in every if HEAD in linears]:
        model.get_output_embeddings().weight = nn.Parameter(torch.cat(parts), requires_grad=False)
    model.tie_weights()
    return model.eval().requires_grad_(False)
