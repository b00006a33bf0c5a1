"""Packed models on disk, and how their bytes come into memory.

`packing` writes a model and `writing` writes any ops: shards (`shards`) and an index (`index`), in a folder that is
complete or not there at all. `store` knows what lies where, and `runs` describes what can be read: layers, ops, rows.
`readers` fetch it into aligned memory (`buffers`), from files that are opened past the page cache (`direct`), by
compiled reads (`chunks`). `gguf_store` is a GGUF file as a store, its matrices cut by `file_ops` and `tensor_ranges`.
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.storage.buffers import aligned_buffer
    from toolkit.storage.bundles import parts, read_neurons
    from toolkit.storage.direct import whole_blocks
    from toolkit.storage.neuron_packing import LAYOUT, Neurons
    from toolkit.storage.packing import ChangedLinears, Linears, Made, pack_model
    from toolkit.storage.readers import open_reader
    from toolkit.storage.store import Store
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "LAYOUT",
    "ChangedLinears",
    "Linears",
    "Made",
    "Neurons",
    "Store",
    "aligned_buffer",
    "open_reader",
    "pack_model",
    "parts",
    "read_neurons",
    "whole_blocks",
]
