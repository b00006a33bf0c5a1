"""All kinds of predictors by name, and the file that keeps those of a model's layers."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields

import torch
from pydantic import ConfigDict, FiniteFloat
from torch import Tensor
from typing_extensions import TypedDict  # pydantic wants it before Python 3.12

from toolkit import tensor_files
from toolkit.errors import UserError, unknown
from toolkit.predictors.low_rank import LowRank
from toolkit.predictors.own_weights import FewBits, Gate, Oracle
from toolkit.predictors.predictor import Predictor, Scored
from toolkit.predictors.states import LayerCorrelation, StateAndParents, TokenState
from toolkit.predictors.weightless import All, CopyLast, Nothing
from toolkit.records import parse_json

log = logging.getLogger(__name__)

KINDS = (FewBits, LowRank, Gate, Oracle, All, CopyLast, Nothing, TokenState, LayerCorrelation, StateAndParents)
PREDICTORS: dict[str, type[Predictor]] = {kind.name: kind for kind in KINDS}
STORED = {name: kind for name, kind in PREDICTORS.items() if issubclass(kind, Scored) and kind is not Oracle}
"""The kinds that a file can keep."""
FILE, VERSION = "predictors", "1"


class KeptPredictor(TypedDict):
    """A file's entry for one predictor; its other settings stand beside these two."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    kind: str
    limit: FiniteFloat


def save_predictors(path: str | os.PathLike, model: str, predictors: Sequence[Predictor | None]) -> None:
    """Write a safetensors file with a checksum; `model` is the name that `load_model` takes.

    Raises `UserError` for trouble with the disk, or a kind of predictor that is not kept in files.
    """
    layers: list[dict | None] = []
    tensors = {}
    for layer, predictor in enumerate(predictors):
        settings, own = parts_of(predictor)
        layers.append(settings)
        tensors |= {f"{layer}.{name}": tensor for name, tensor in own.items()}
    tensor_files.save(path, FILE, {"version": VERSION, "model": model, "layers": json.dumps(layers)}, tensors)


def parts_of(predictor: Predictor | None) -> tuple[dict | None, dict[str, Tensor]]:
    """The settings of a predictor as plain JSON, and its tensors. Raises `UserError` for a kind that no file keeps."""
    if predictor is None:
        return None, {}
    if not isinstance(predictor, Scored) or predictor.name not in STORED:
        raise UserError(f"predictor {predictor.name!r} is not kept in files")
    names = [field.name for field in fields(predictor) if field.name not in predictor.tensors]
    return {"kind": predictor.name} | {name: getattr(predictor, name) for name in names}, predictor.stored()


def predictor_of(settings: dict | None, tensors: Mapping[str, Tensor]) -> Predictor | None:
    """The predictor of these parts. Raises `UserError` for an unknown kind, and what its class raises."""
    if settings is None:
        return None
    kind, others = settings["kind"], {name: value for name, value in settings.items() if name != "kind"}
    if kind not in STORED:
        raise unknown("predictor", kind, STORED)
    return STORED[kind].restored(**others, **tensors)


def load_predictors(path: str | os.PathLike, model: str) -> list[Predictor | None]:
    """The predictors of this model's layers; None for a layer that loads every neuron, which is logged.

    Raises `UserError` for a file that is damaged, inconsistent, of another kind or of another model's predictors.
    """
    about, tensors = tensor_files.load_for(path, FILE, (VERSION,), model)
    settings = parse_json(about.get("layers", ""), list[KeptPredictor | None], path)
    with tensor_files.consistent(path, FILE):
        layers = list(_rebuilt(settings, tensors))
    if without := [layer for layer, predictor in enumerate(layers) if predictor is None]:
        log.warning("no predictor for layers %s of %s: they load every neuron", without, model)
    return layers


def _rebuilt(layers: Sequence[dict | None], tensors: MutableMapping[str, Tensor]) -> Iterator[Predictor | None]:
    """A layer's tensors are taken out of the mapping, since some predictors keep them in another order, as copies."""
    for layer, settings in enumerate(layers):
        prefix = f"{layer}."
        names = [name for name in tensors if name.startswith(prefix)]
        predictor = predictor_of(settings, {name.removeprefix(prefix): tensors.pop(name) for name in names})
        if predictor is not None:
            neurons, hidden = predictor.shape
            if predictor.mask(torch.zeros(1, hidden)).shape != (1, neurons):  # raises where types or shapes do not fit
                raise ValueError(f"tensors of layer {layer} do not fit each other")
        yield predictor
