"""Model folders that other tools read and write: `sparse-bitmask` of compressed-tensors 0.9 to 0.14, and spqr_quant's.

    save_model(model, "pruned-model")                 # weights packed where that saves bytes
    checkpoint = open_checkpoint("pruned-model")
    checkpoint.packed("model.layers.0.mlp.up_proj.weight")  # as the Endor that kernels multiply with
    model = load_dense_model("pruned-model")

compressed-tensors dropped the layout in 0.15, the oldest version that transformers 5 accepts. Together they load such a
folder with random numbers in place of its packed weights, and only warn. This module needs neither package's support.
`spqr_quant` describes the other layout; `open_checkpoint` and `load_dense_model` read both.
"""

from toolkit.interchange.checkpoint_files import Checkpoint
from toolkit.interchange.reading import load_dense_model, open_checkpoint
from toolkit.interchange.spqr_quant import open_spqr_quant, save_spqr_quant
from toolkit.interchange.writing import save_checkpoint, save_model

__all__ = [
    "Checkpoint",
    "load_dense_model",
    "open_checkpoint",
    "open_spqr_quant",
    "save_checkpoint",
    "save_model",
    "save_spqr_quant",
]
