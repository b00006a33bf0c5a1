"""The predictors of all layers of a model, and the file that keeps them."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from pydantic import ConfigDict, FiniteFloat
from typing_extensions import TypedDict  # pydantic wants it before Python 3.12

from toolkit import tensor_files
from toolkit.errors import UserError, unknown
from toolkit.predictors.foresight import Foresight
from toolkit.predictors.predictor import Predictor
from toolkit.predictors.registry import STORED
from toolkit.records import parse_json

log = logging.getLogger(__name__)

FILE, VERSION = "predictors", "1"


class KeptPredictor(TypedDict):
    """A file's entry for one predictor; its other settings stand beside these two."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    kind: str
    limit: FiniteFloat


@dataclass(frozen=True, eq=False)
class Predictors(Sequence):
    """One predictor for each layer; None for a layer that loads every neuron.

    Args:
        model: the name of the model, as `load_model` takes it.
        layers: of each layer.
    """

    model: str
    layers: tuple[Foresight | None, ...]

    def __post_init__(self):
        """Say which layers load every neuron."""
        if without := [layer for layer, predictor in enumerate(self.layers) if predictor is None]:
            log.warning("no predictor for layers %s of %s: they load every neuron", without, self.model)

    def __getitem__(self, layer: int) -> Foresight | None:
        """The predictor of a layer."""
        return self.layers[layer]

    def __len__(self) -> int:
        """Decoder blocks."""
        return len(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes that stay in memory."""
        return sum(predictor.nbytes for predictor in self.layers if predictor)

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file with a checksum.

        Raises `UserError` for trouble with the disk, or a kind of predictor that is not kept in files.
        """
        layers: list[dict | None] = []
        tensors = {}
        for layer, predictor in enumerate(self.layers):
            if predictor is None:
                layers.append(None)
            elif isinstance(predictor, Predictor) and predictor.name in STORED:
                layers.append({"kind": predictor.name} | predictor.settings)
                tensors |= {f"{layer}.{name}": tensor for name, tensor in predictor.stored().items()}
            else:
                raise UserError(f"layer {layer}: predictor {predictor.name!r} is not kept in files")
        about = {"version": VERSION, "model": self.model, "layers": json.dumps(layers)}
        tensor_files.save(path, FILE, about, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike, model: str) -> "Predictors":
        """Read the predictors of this model.

        Raises `UserError` for a file that is damaged, inconsistent, of another kind or of another model's predictors.
        """
        about, tensors = tensor_files.load_for(path, FILE, (VERSION,), model)
        layers = parse_json(about.get("layers", ""), list[KeptPredictor | None], path)
        with tensor_files.consistent(path, FILE):
            return cls(model, tuple(_rebuilt(layers, tensors)))


def _rebuilt(about: list[dict | None], tensors: dict) -> Iterator[Predictor | None]:
    for layer, settings in enumerate(about):
        if settings is None:
            yield None
            continue
        if (name := settings.pop("kind")) not in STORED:
            raise unknown("predictor", name, STORED)
        prefix = f"{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        predictor = STORED[name].restored(**settings, **own)
        predictor.mask(torch.zeros(1, predictor.shape[1]))  # raises where types or shapes do not fit each other
        yield predictor
