"""Read a checkpoint of another tool one tensor at a time, dense or packed. No code in it is executed."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.files import check_memory, path_of
from toolkit.formats import FormatError
from toolkit.formats.endor import Endor
from toolkit.formats.sparse_bitmask import PARTS, SparseBitmask
from toolkit.interchange.checkpoint_files import read_object, read_tensor, stored_tensors, tensor_shape
from toolkit.interchange.spqr_quant import METHOD, SpqrQuantCheckpoint, open_spqr_quant
from toolkit.models.plain import as_stored, plain
from toolkit.models.skeleton import CONFIG, check_outline, read_config
from toolkit.records import line

# older releases wrote the second
ENTRIES = ("quantization_config", "compression_config")
FORMAT = "sparse-bitmask"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An open checkpoint. It holds names only and reads a tensor on request.

    Weights of a module `m` are stored as `m.shape`, `m.compressed`, `m.bitmask` and `m.row_offsets`, and named
    `m.weight` here, as the model names them. If the checkpoint is also quantised, only the sparse packing is undone:
    its scales are ordinary tensors and its weights stay quantised.
    """

    folder: Path
    config: dict  # of config.json
    stored: Mapping[str, Path]  # name of a stored tensor -> file that holds it

    @property
    def packed_names(self) -> list[str]:
        """The weights that are stored packed, in stored order."""
        modules = dict.fromkeys(module for module, part in map(split, self.stored) if part)
        return [f"{module}.weight" for module in modules]

    @property
    def names(self) -> list[str]:
        """All tensors by the names that the model gives them: the packed weights, then the others."""
        return self.packed_names + [name for name in self.stored if not split(name)[1]]

    def tensor(self, name: str) -> Tensor:
        """One tensor, dense. Raises `UserError` for an unknown name, `FormatError` if it is damaged."""
        if name in self.stored:
            return read_tensor(self.stored[name], name).clone()  # the library's tensors are views of the file
        return self._sparse_bitmask(name).decode()

    def packed(self, name: str) -> Endor:
        """One packed weight, as its kernels take it.

        Raises `UserError` for a name that is unknown or not packed, or elements of a type that `Endor` does not hold;
        `FormatError` if it is damaged.
        """
        packed = self._sparse_bitmask(name).to_endor()
        return Endor(**{key: value.clone() if torch.is_tensor(value) else value for key, value in vars(packed).items()})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, dense, one after the other. Only one is in memory at a time, unless the caller keeps them."""
        for name in self.names:
            yield name, self.tensor(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor when dense, by name, from the files' headers. Raises `FormatError`."""
        packed = {name: f"{name.removesuffix('.weight')}.shape" for name in self.packed_names}
        found = {name: tuple(read_tensor(self.stored[shape], shape).tolist()) for name, shape in packed.items()}
        return found | {name: tensor_shape(self.stored[name], name) for name in self.names if name not in found}

    def _sparse_bitmask(self, name: str) -> SparseBitmask:
        module = name.removesuffix(".weight")
        files = {part: self.stored.get(f"{module}.{part}") for part in PARTS}
        if module == name or None in files.values():
            kind = "is not packed" if name in self.stored else "does not exist"
            raise UserError(f"{self.folder}: tensor {name!r} {kind}; the names are in .names and .packed_names")
        parts = {part: read_tensor(file, f"{module}.{part}") for part, file in files.items()}
        try:
            return SparseBitmask.from_tensors(parts)
        except (ValueError, RuntimeError) as error:
            raise FormatError(f"{files['bitmask']}: inconsistent weight {name!r}: {line(error)}") from error


def open_checkpoint(folder: str | os.PathLike) -> Checkpoint | SpqrQuantCheckpoint:
    """Open a checkpoint folder: config.json, and model.safetensors or its index and shards.

    One of spqr_quant is opened as `open_spqr_quant` does. Raises `FormatError`, naming file and tensor, if a file is
    missing, damaged or pickled, the sparsity format is another, the index disagrees with its shards, or a packed weight
    lacks one of its four tensors.
    """
    folder = path_of(folder)
    config = read_object(folder / CONFIG)
    entry = config.get("quantization_config")
    if isinstance(entry, dict) and entry.get("quant_method") == METHOD:
        return open_spqr_quant(folder)
    _check_format(folder / CONFIG, config)
    stored = stored_tensors(folder)
    for name, file in stored.items():
        module, part = split(name)
        missing = [other for other in PARTS if part and f"{module}.{other}" not in stored]
        if missing:
            raise FormatError(f"{file}: weight {module + '.weight'!r} lacks its tensor {module + '.' + missing[0]!r}")
    return Checkpoint(folder, config, stored)


def load_dense_model(folder: str | os.PathLike, dtype: torch.dtype | str = "auto") -> nn.Module:
    """The checkpoint as an ordinary transformers model, dense, in evaluation mode and without gradients.

    dtype: of all weights; "auto" takes the config's. Raises `FormatError` as `open_checkpoint` does, and if the tensors
    are not exactly those of the model that config.json describes; `UserError` if that is no causal language model that
    transformers knows.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from toolkit import hub

    checkpoint = open_checkpoint(folder)
    shapes = checkpoint.shapes()
    config = read_config(checkpoint.folder, shapes.values())
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{checkpoint.folder / CONFIG}: transformers has no causal language model of this type")
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    for entry in ENTRIES:
        vars(config).pop(entry, None)  # else transformers looks for the package that the entry names
    check_outline(config, lambda model: _check_shapes(checkpoint.folder, shapes, model), architecture)
    with hub.quiet():
        model, told = architecture.from_pretrained(
            None, config=config, state_dict=dict(checkpoint.tensors()), dtype=dtype, output_loading_info=True
        )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if told[fault]:
            name = min(map(str, told[fault]))
            raise FormatError(f"{checkpoint.folder}: {fault.replace('_keys', '')} tensor {name} for its {CONFIG}")
    return plain(model).eval().requires_grad_(False)


def load_tokenizer(folder: str | os.PathLike) -> object:
    """The tokenizer beside a checkpoint. Raises `UserError` if there is none that transformers knows."""
    from transformers import AutoTokenizer

    from toolkit import hub

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **hub.NO_CODE)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: no tokenizer can be read: {hub.reason(error)}") from error


def _check_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> None:
    """Raise `FormatError` for a tensor of another shape, before transformers makes the model's own in its place."""
    for name, tensor in as_stored(model):
        if shapes.get(name, tuple(tensor.shape)) != tuple(tensor.shape):
            raise FormatError(f"{folder}: mismatched tensor {name} for its {CONFIG}")
    check_memory(sum(tensor.nbytes for tensor in model.state_dict().values()), f"the model of {folder / CONFIG}")


def split(name: str) -> tuple[str, str]:
    """Module and part of a packed weight's tensor. The part of any other tensor is ""."""
    module, _, part = name.rpartition(".")
    return (module, part) if module and part in PARTS else (name, "")


def _check_format(path: Path, config: dict) -> None:
    entry = next((config[entry] for entry in ENTRIES if isinstance(config.get(entry), dict)), {})
    sparsity = entry.get("sparsity_config")
    if not isinstance(sparsity, dict) or "format" not in sparsity:
        raise FormatError(f"{path}: has no sparsity_config: not a {FORMAT} checkpoint")
    if sparsity["format"] != FORMAT:
        raise FormatError(f"{path}: sparsity format {sparsity['format']!r}; this code reads {FORMAT!r}")
