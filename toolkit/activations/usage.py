"""How often text uses each neuron, and the file that keeps it: the most used neurons of a model are its hot ones.

Usage(name, shares).save("usage.safetensors")
shares = Usage.load("usage.safetensors", name).layers
"""

import os
from dataclasses import dataclass
from typing import Self

from jaxtyping import Float
from torch import Tensor

from toolkit import tensor_files
from toolkit.errors import UserError

FILE, VERSION = "usage of neurons", "1"


@dataclass(frozen=True, eq=False)
class Usage:
    """The share of tokens that each neuron is active for.

    Args:
        model: the name of the model, as `load_model` takes it.
        layers: a number from 0 to 1 for each neuron of each layer.

    Raises `UserError` for other numbers.
    """

    model: str
    layers: tuple[Float[Tensor, " neurons"], ...]

    def __post_init__(self):
        """Refuse numbers that are no shares; NaN is none."""
        for layer, shares in enumerate(self.layers):
            wrong = shares[~((shares >= 0) & (shares <= 1))]
            if shares.ndim != 1 or len(wrong):
                told = f"share {float(wrong[0]):g}" if len(wrong) else f"shares {list(shares.shape)}"
                raise UserError(f"usage of layer {layer}: {told}; expected a share from 0 to 1 for each neuron")

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file with a checksum. Raises `UserError` for trouble with the disk."""
        tensors = {str(layer): shares for layer, shares in enumerate(self.layers)}
        tensor_files.save(path, FILE, {"version": VERSION, "model": self.model}, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike, model: str) -> Self:
        """Read the usage of this model's neurons.

        Raises `UserError` for a file that is damaged, inconsistent, of another kind or about another model.
        """
        _, tensors = tensor_files.load_for(path, FILE, (VERSION,), model)
        with tensor_files.consistent(path, FILE):
            if any(not tensor.is_floating_point() for tensor in tensors.values()):
                raise ValueError("shares of another type")
            try:
                return cls(model, tuple(tensors[str(layer)] for layer in range(len(tensors))))
            except UserError as error:
                raise ValueError(str(error)) from error
