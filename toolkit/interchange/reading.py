"""Read a checkpoint of another tool one tensor at a time, dense or packed. No code in it is executed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.files import check_memory, path_of
from toolkit.formats import FormatError
from toolkit.formats.sparse_bitmask import PARTS, SparseBitmask
from toolkit.interchange.checkpoint_files import Checkpoint, TensorFiles, packed_modules, read_object, stored_tensors
from toolkit.interchange.spqr_quant import METHOD, open_spqr_quant
from toolkit.models.gguf_header import read_header
from toolkit.models.gguf_tokenizer import read_tokenizer
from toolkit.models.plain import as_stored, plain
from toolkit.models.skeleton import CONFIG, check_outline, read_config

# older releases wrote the second
ENTRIES = ("quantization_config", "compression_config")
FORMAT = "sparse-bitmask"


def open_checkpoint(folder: str | os.PathLike) -> Checkpoint:
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
    named = {f"{module}.weight": f"{module}.shape" for module in packed_modules(stored, PARTS)}
    with TensorFiles() as files:
        values = {name: files.tensor(stored[shape], shape) for name, shape in named.items()}
        shapes = {name: tuple(value.flatten().tolist()) for name, value in values.items()}
    return Checkpoint(folder, config, stored, PARTS, shapes, lambda tensors, _: SparseBitmask.from_tensors(tensors))


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
        model, loading = architecture.from_pretrained(
            None, config=config, state_dict=dict(checkpoint.tensors()), dtype=dtype, output_loading_info=True
        )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[fault]:
            name = min(map(str, loading[fault]))
            raise FormatError(f"{checkpoint.folder}: {fault.replace('_keys', '')} tensor {name} for its {CONFIG}")
    return plain(model).eval().requires_grad_(False)


def load_tokenizer(folder: str | os.PathLike) -> object:
    """The tokenizer beside a checkpoint, or in a GGUF file. Raises `UserError` if transformers knows none there."""
    from toolkit import hub

    if path_of(folder).is_file():
        with hub.quiet():
            return read_tokenizer(read_header(path_of(folder)))
    with hub.foreign_code(folder, "no tokenizer can be read"), hub.quiet():
        return hub.read_tokenizer(folder, local_files_only=True)


def _check_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> None:
    """Raise `FormatError` for a tensor of another shape, before transformers makes the model's own in its place."""
    for name, tensor in as_stored(model):
        if shapes.get(name, tuple(tensor.shape)) != tuple(tensor.shape):
            raise FormatError(f"{folder}: mismatched tensor {name} for its {CONFIG}")
    check_memory(sum(tensor.nbytes for tensor in model.state_dict().values()), f"the model of {folder / CONFIG}")


def _check_format(path: Path, config: dict) -> None:
    entry = next((config[entry] for entry in ENTRIES if isinstance(config.get(entry), dict)), {})
    sparsity = entry.get("sparsity_config")
    if not isinstance(sparsity, dict) or "format" not in sparsity:
        raise FormatError(f"{path}: has no sparsity_config: not a {FORMAT} checkpoint")
    if sparsity["format"] != FORMAT:
        raise FormatError(f"{path}: sparsity format {sparsity['format']!r}; this code reads {FORMAT!r}")
