"""Model folders that other tools read and write: `sparse-bitmask` checkpoints of compressed-tensors 0.9 to 0.14.

    save_model(model, "pruned-model")                 # weights packed where that saves bytes
    checkpoint = open_checkpoint("pruned-model")
    checkpoint.packed("model.layers.0.mlp.up_proj.weight")  # as the Endor that kernels multiply with
    model = load_dense_model("pruned-model")

compressed-tensors dropped the layout in 0.15, the oldest version that transformers 5 accepts. Together they load such a
folder with random numbers in place of its packed weights, and only warn. This module needs neither package's support.
"""

from toolkit.interchange.reading import Checkpoint, load_dense_model, open_checkpoint
from toolkit.interchange.writing import save_checkpoint, save_model

__all__ = ["Checkpoint", "load_dense_model", "open_checkpoint", "save_checkpoint", "save_model"]
