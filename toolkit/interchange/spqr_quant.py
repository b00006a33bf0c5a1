"""Checkpoints of spqr_quant 0.2, the SpQR authors' library, which transformers loads as `quant_method` "spqr".

A module `m` has four tensors in place of `m.weight`. The words and outliers are those of `toolkit.formats.spqr`:

    m.dense_weights  int64 [⌈rows/16⌉ · ⌈columns/16⌉ · 16]
    m.row_offsets    int32 [rows + 1] if outliers are stored as CSR, [rows/16 + 1] as PTCSR
    m.col_vals       int32 [outliers, with padding]
    m.in_perm        int32 [columns/2]: uint16 pairs, the first in the low half; empty if the order was kept

Rows and columns are the model's. config.json tells the bits, the sizes of a tile and the number of elements of each
tensor. (Sources: `inference.py` and `spqr_cuda.cpp` of spqr_quant 0.2.0, `integrations/spqr.py` of transformers 5.)

The library reads columns as signed 16-bit numbers, has no biases, and loses statistics of a tile with fewer than 16
rows. Matrices that it cannot hold are refused.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.files import new_folder, path_of
from toolkit.formats import QUANTISED, FormatError
from toolkit.formats.spqr import SpQRMatrix
from toolkit.interchange.checkpoint_files import (
    SHARD_BYTES,
    Checkpoint,
    Shards,
    own,
    packed_modules,
    read_object,
    stored_shapes,
    stored_tensors,
    write_object,
)
from toolkit.kernels.spqr import TILE, tiles
from toolkit.models.skeleton import CONFIG, check_outline, read_config
from toolkit.records import line

METHOD = "spqr"
PARTS = ("dense_weights", "row_offsets", "col_vals", "in_perm")
LAYOUT = {"bits": 3, "beta1": TILE, "beta2": TILE}
MOST_COLUMNS = 1 << 15


def open_spqr_quant(folder: str | os.PathLike, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Checkpoint:
    """Open a checkpoint folder: config.json, and model.safetensors or its index and shards.

    `shapes` tells the shape of each quantised weight; None takes those of the model that config.json describes. Raises
    `FormatError`, naming the file, if one is missing, damaged or pickled, the layout is another, or a weight lacks one
    of its tensors or is none of the model's.
    """
    folder = path_of(folder)
    config = read_object(folder / CONFIG)
    _check_layout(folder / CONFIG, config.get("quantization_config"))
    stored = stored_tensors(folder)
    shapes, matrices = _model_shapes(folder, stored) if shapes is None else shapes, {}
    for module, file in packed_modules(stored, PARTS, optional=PARTS[3:]).items():
        name = f"{module}.weight"
        if len(shapes.get(name, ())) != 2:
            raise FormatError(f"{file}: weight {name!r} is no matrix of the model in {folder / CONFIG}")
        matrices[name] = shapes[name]
    return Checkpoint(folder, config, stored, PARTS, matrices, from_tensors)


def save_spqr_quant(
    folder: str | os.PathLike,
    weights: Iterable[tuple[str, Tensor | SpQRMatrix]],
    config: Mapping,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint that spqr_quant reads. Weights are taken one at a time.

    Args:
        folder: the folder to make; it must not exist.
        weights: the model's names and tensors; quantised matrices are stored quantised, dense ones as they are.
        config: the model's config.json; the entry that describes the layout is added.
        shard_bytes: the size at which a new file begins; a quantised weight is never split.

    Raises `UserError`, naming the weight, for a matrix that the layout cannot hold, a bias of a quantised module, a
    name that comes twice or a folder that exists. After any error nothing is left behind.
    """
    with new_folder(path_of(folder)) as part:
        files, shapes, dense, quantised = Shards(part, shard_bytes), {}, [], set()
        for name, weight in weights:
            module = name.rpartition(".")[0]
            if isinstance(weight, Tensor):
                dense.append(name)
                files.add({name: own(weight)})
                continue
            if not name.endswith(".weight"):
                raise UserError(f"cannot store {name!r} quantised; expected a name that ends in .weight")
            try:
                found = {f"{module}.{key}": own(tensor) for key, tensor in to_tensors(weight).items()}
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
            files.add(found)
            quantised.add(module)
            shapes |= {f"{key}.shape": tensor.numel() for key, tensor in found.items()}
        if biased := [name for name in dense if name.endswith(".bias") and name.removesuffix(".bias") in quantised]:
            raise UserError(f"{biased[0]}: spqr_quant has no biases; leave this module's weight dense")
        files.close()
        kept = [name for name in dense if name.endswith(".weight")]
        entry = {"quant_method": METHOD, **LAYOUT, "shapes": shapes, "modules_to_not_convert": kept}
        write_object(part / CONFIG, {**config, "quantization_config": entry})


def to_tensors(packed: SpQRMatrix) -> dict[str, Tensor]:
    """The four `PARTS` of a matrix. Raises `UserError` for one that the layout cannot hold."""
    rows, columns = packed.shape
    if columns > MOST_COLUMNS:
        raise UserError(f"{columns} columns; spqr_quant reads at most {MOST_COLUMNS}: leave this weight dense")
    if rows % TILE:
        raise UserError(f"{rows} rows; spqr_quant reads multiples of {TILE}: leave this weight dense")
    order = torch.empty(0, dtype=torch.int32)
    if packed.permutation is not None:
        if columns % 2:
            raise UserError(f"{columns} columns in another order; spqr_quant reads even numbers: keep the order")
        order = torch.from_numpy(packed.permutation.numpy().astype(np.uint16).view(np.int32))
    return dict(zip(PARTS, (packed.words.flatten(), packed.offsets, packed.col_vals, order), strict=True))


def from_tensors(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> SpQRMatrix:
    """A matrix of its `PARTS`, as fp16; without `in_perm` the order was kept. Raises `ValueError` unless they agree."""
    rows, columns = shape
    words, offsets, col_vals = (tensors[part] for part in PARTS[:3])
    if rows % TILE or columns > MOST_COLUMNS:
        raise ValueError(f"{rows} × {columns}; expected multiples of {TILE} rows and at most {MOST_COLUMNS} columns")
    if words.numel() != (expected := tiles(shape)[0] * tiles(shape)[1] * TILE):
        raise ValueError(f"{words.numel()} words; expected {expected} for {rows} × {columns}")
    form = QUANTISED["spqr_ptcsr" if offsets.numel() == rows // TILE + 1 else "spqr"]
    if not col_vals.numel():
        col_vals = col_vals.to(torch.int32)  # the library writes none as float32
    order = tensors.get("in_perm")
    if order is not None and order.numel():
        if order.dtype != torch.int32 or 2 * order.numel() != columns:
            raise ValueError(f"in_perm is {order.dtype} {list(order.shape)}; expected torch.int32 [{columns // 2}]")
        order = torch.from_numpy(order.contiguous().numpy().view(np.uint16).astype(np.int32))
    else:
        order = None
    packed = form(shape, torch.float16, words.view(*tiles(shape), TILE), offsets, col_vals, order)
    packed.check()
    return packed


def _check_layout(path: Path, entry: object) -> None:
    if not isinstance(entry, dict) or entry.get("quant_method") != METHOD:
        raise FormatError(f"{path}: has no quantization_config with quant_method {METHOD!r}")
    for name, expected in LAYOUT.items():
        if entry.get(name, expected) != expected:
            raise FormatError(f"{path}: {name} is {line(entry[name])}; this code reads {expected}")


def _model_shapes(folder: Path, stored: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of the model that config.json describes."""
    config = read_config(folder, stored_shapes(stored).values())
    vars(config).pop("quantization_config", None)
    found: dict[str, tuple[int, ...]] = {}

    def take(model) -> None:
        found.update({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})

    check_outline(config, take)
    return found
