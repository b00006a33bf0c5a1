"""A trace: which FFN neurons were active, for each token and layer, one bit each, and the file that keeps it."""

import json
import os
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int32, UInt8
from torch import Tensor

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.records import line

KIND, VERSION = "activation trace", "1"


@dataclass(frozen=True, eq=False)
class Trace:
    """Bit i of a token's bytes (the lowest bit first) tells whether neuron i of the layer was active.

    Args:
        model: the name of the model, as `load_model` takes it.
        corpus: the text, as `load_tokens` takes it, or what else the tokens are from.
        tokens: token ids; each row is a sequence of its own, read from a blank context.
        thresholds: what the magnitudes of a layer's active neurons exceed.
        neurons: of each layer.
        bits: of each layer; bits beyond the last neuron are 0.

    Raises `UserError` for parts that do not fit each other.
    """

    model: str
    corpus: str
    tokens: Int32[Tensor, "sequences length"]
    thresholds: Float32[Tensor, " layers"]
    neurons: tuple[int, ...]
    bits: tuple[UInt8[Tensor, "sequences length bytes"], ...]

    def __post_init__(self):
        """Refuse parts that do not fit each other."""
        if self.tokens.ndim != 2:
            raise UserError(f"tokens of a trace: {list(self.tokens.shape)}; expected sequences × tokens")
        _expect("tokens", self.tokens, torch.int32, tuple(self.tokens.shape))
        _expect("thresholds", self.thresholds, torch.float32, (len(self.neurons),))
        if len(self.bits) != len(self.neurons):
            raise UserError(f"a trace has bits of {len(self.bits)} layers and neurons of {len(self.neurons)}")
        for layer, (count, bits) in enumerate(zip(self.neurons, self.bits, strict=True)):
            if type(count) is not int or count < 1:
                raise UserError(f"layer {layer} of a trace has {count!r} neurons; expected 1 or more")
            _expect(f"bits of layer {layer}", bits, torch.uint8, (*self.tokens.shape, -(-count // 8)))
            if count % 8 and bool((bits[..., -1] >> count % 8).any()):
                raise UserError(f"layer {layer} of a trace has bits beyond its {count} neurons")

    @property
    def layers(self) -> int:
        """Decoder blocks."""
        return len(self.neurons)

    def active(self, layer: int) -> Bool[Tensor, "sequences length neurons"]:
        """Which neurons of a layer were active, a byte each."""
        packed = self.bits[layer].numpy()
        return torch.from_numpy(np.unpackbits(packed, axis=-1, count=self.neurons[layer], bitorder="little")).bool()

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file with a checksum. Raises `UserError` for trouble with the disk."""
        about = {"version": VERSION, "model": self.model, "corpus": self.corpus, "neurons": json.dumps(self.neurons)}
        tensors = {f"bits.{layer}": bits for layer, bits in enumerate(self.bits)}
        tensor_files.save(path, KIND, about, tensors | {"tokens": self.tokens, "thresholds": self.thresholds})

    @classmethod
    def load(cls, path: str | os.PathLike, model: str) -> "Trace":
        """Read a trace of this model.

        Raises `UserError` for a file that is damaged, no trace, inconsistent or of another model.
        """
        about, tensors = tensor_files.load_for(path, KIND, VERSION, model)
        try:
            neurons = tuple(json.loads(about["neurons"]))
            bits = tuple(tensors.pop(f"bits.{layer}") for layer in range(len(neurons)))
            return cls(model, about["corpus"], tensors["tokens"], tensors["thresholds"], neurons, bits)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise UserError(f"{path}: inconsistent trace: {line(error)}") from error


def pack(active: Bool[Tensor, "*shape neurons"]) -> UInt8[Tensor, "*shape bytes"]:
    """One bit a neuron, the lowest bit first; the last byte is filled up with zeros."""
    return torch.from_numpy(np.packbits(active.cpu().numpy(), axis=-1, bitorder="little"))


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise UserError(f"{name} of a trace: {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
