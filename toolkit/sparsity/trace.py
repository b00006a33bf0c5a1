"""A trace: which units of a layer were active for each token, one bit each, and the file that keeps it."""

import json
import os
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int32, UInt8
from pydantic import Field
from torch import Tensor

from toolkit import tensor_files
from toolkit.errors import UserError, unknown
from toolkit.records import parse_json

KIND, VERSION = "activation trace", "2"
EARLIER = "1"  # its units are FFN neurons, all with thresholds
LAYERS = Annotated[list[int], Field(min_length=1)]  # what a file says of units
UNITS = ("FFN neuron", "attention neuron", "expert")


@dataclass(frozen=True, eq=False)
class Trace:
    """Bit i of a token's bytes (the lowest bit first) tells whether unit i of the layer was active.

    Args:
        model: the name of the model, as `load_model` takes it.
        corpus: the text, as `load_tokens` takes it, or another source of the tokens.
        tokens: token ids; each row is a sequence of its own, read from a blank context.
        units: how many there are in each layer.
        bits: of each layer; bits beyond the last unit are 0.
        unit: one of `UNITS`. A layer with units of two kinds has two traces of the same tokens.
        thresholds: the magnitudes of a layer's active neurons exceed it, if thresholds decide.
        weights: of each layer, the router's weight of each active expert, and 0 for the others.

    Raises `UserError` for an unknown unit, or bits of other layers, tokens or units.
    """

    model: str
    corpus: str
    tokens: Int32[Tensor, "sequences length"]
    units: tuple[int, ...]
    bits: tuple[UInt8[Tensor, "sequences length bytes"], ...]
    unit: str = UNITS[0]
    thresholds: Float32[Tensor, " layers"] | None = None
    weights: tuple[Float32[Tensor, "sequences length units"], ...] | None = None

    def __post_init__(self):
        """Refuse an unknown unit, and bits of other layers, tokens or units."""
        if self.unit not in UNITS:
            raise unknown("unit of a trace", self.unit, UNITS)
        expected = [[*self.tokens.shape, -(-count // 8)] for count in self.units]
        if (found := [list(bits.shape) for bits in self.bits]) != expected:
            raise UserError(f"bits of a trace: {found}; expected {expected} for {list(self.units)} units")

    @property
    def layers(self) -> int:
        """Decoder blocks."""
        return len(self.units)

    def active(self, layer: int) -> Bool[Tensor, "sequences length units"]:
        """Which units of a layer were active, a byte each."""
        packed = self.bits[layer].numpy()
        return torch.from_numpy(np.unpackbits(packed, axis=-1, count=self.units[layer], bitorder="little")).bool()

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file with a checksum. Raises `UserError` for trouble with the disk."""
        about = {"version": VERSION, "model": self.model, "corpus": self.corpus, "unit": self.unit}
        tensors = {"tokens": self.tokens} | {f"bits.{layer}": bits for layer, bits in enumerate(self.bits)}
        tensors |= {f"weights.{layer}": values for layer, values in enumerate(self.weights or ())}
        if self.thresholds is not None:
            tensors["thresholds"] = self.thresholds
        tensor_files.save(path, KIND, about | {"units": json.dumps(self.units)}, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike, model: str) -> "Trace":
        """Read a trace of this model.

        Raises `UserError` for a file that is damaged, no trace, inconsistent or of another model.
        """
        about, tensors = tensor_files.load_for(path, KIND, (EARLIER, VERSION), model)
        if about["version"] == EARLIER:
            about |= {"units": about.get("neurons", ""), "unit": UNITS[0]}
        units = tuple(parse_json(about.get("units", ""), LAYERS, path))
        with tensor_files.consistent(path, "trace"):
            bits = tuple(tensors[f"bits.{layer}"] for layer in range(len(units)))
            weights = tuple(tensors[name] for layer in range(len(units)) if (name := f"weights.{layer}") in tensors)
            optional = {"thresholds": tensors.get("thresholds"), "weights": weights or None}
            return cls(model, about["corpus"], tensors["tokens"], units, bits, about["unit"], **optional)


def pack(active: Bool[Tensor, "*shape units"]) -> UInt8[Tensor, "*shape bytes"]:
    """One bit a unit, the lowest bit first; the last byte is filled up with zeros."""
    return torch.from_numpy(np.packbits(active.cpu().numpy(), axis=-1, bitorder="little"))
