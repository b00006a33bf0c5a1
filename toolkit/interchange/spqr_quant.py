"""Checkpoints of spqr_quant 0.2, the SpQR authors' library, which transformers loads as `quant_method` "spqr".

A module `m` has four tensors in place of `m.weight`. The words and outliers are those of `toolkit.formats.spqr`:

    m.dense_weights  int64 [⌈rows/16⌉ · ⌈columns/16⌉ · 16]
    m.row_offsets    int32 [rows + 1] if outliers are stored as CSR, [rows/16 + 1] as PTCSR
    m.col_vals       int32 [outliers, with padding]
    m.in_perm        int32 [columns/2]: uint16 pairs, the first in the low half; empty if the order was kept

Rows and columns are the model's. config.json tells the bits, the sizes of a tile and the number of elements of each
tensor. (Sources: `inference.py` and `spqr_cuda.cpp` of spqr_quant 0.2.0, `integrations/spqr.py` of transformers 5.)

The library reads columns as signed 16-bit numbers, has no biases, and loses statistics of a tile of fewer than 16 rows.
A matrix that it cannot hold is refused.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.files import new_folder, path_of
from toolkit.formats import QUANTISED, FormatError
from toolkit.formats.spqr import SpQRMatrix
from toolkit.interchange.checkpoint_files import Shards, own, read_object, read_tensor, stored_tensors, tensor_shape
from toolkit.interchange.checkpoint_files import write_object as write_config
from toolkit.kernels.spqr import TILE, tiles
from toolkit.models.skeleton import CONFIG, check_outline, read_config
from toolkit.records import line

METHOD = "spqr"
PARTS = ("dense_weights", "row_offsets", "col_vals", "in_perm")
LAYOUT = {"bits": 3, "beta1": TILE, "beta2": TILE}
MOST_COLUMNS = 1 << 15
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, eq=False)
class SpqrQuantCheckpoint:
    """An open checkpoint. It holds names and shapes only and reads a tensor on request."""

    folder: Path
    config: dict  # of config.json
    stored: Mapping[str, Path]  # name of a stored tensor -> file that holds it
    matrices: Mapping[str, tuple[int, int]]  # name of a quantised weight -> its shape

    @property
    def packed_names(self) -> list[str]:
        """The weights that are stored quantised, in stored order."""
        return list(self.matrices)

    @property
    def names(self) -> list[str]:
        """All tensors by the names that the model gives them: the quantised weights, then the others."""
        return self.packed_names + [name for name in self.stored if not split(name)[1]]

    def tensor(self, name: str) -> Tensor:
        """One tensor, dense. Raises `UserError` for an unknown name, `FormatError` if it is damaged."""
        if name in self.stored and not split(name)[1]:
            return read_tensor(self.stored[name], name).clone()  # the library's tensors are views of the file
        return self.packed(name).decode()

    def packed(self, name: str) -> SpQRMatrix:
        """One quantised weight, as fp16. Raises `UserError` for an unknown name, `FormatError` if it is damaged."""
        if name not in self.matrices:
            kind = "is not quantised" if name in self.stored else "does not exist"
            raise UserError(f"{self.folder}: tensor {name!r} {kind}; the names are in .names and .packed_names")
        module = name.removesuffix(".weight")
        files = {part: self.stored[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in self.stored}
        parts = {part: read_tensor(file, f"{module}.{part}").clone() for part, file in files.items()}
        try:
            return from_tensors(parts, self.matrices[name])
        except (ValueError, RuntimeError) as error:
            raise FormatError(f"{files[PARTS[0]]}: inconsistent weight {name!r}: {line(error)}") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, dense, one after the other."""
        for name in self.names:
            yield name, self.tensor(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor when dense, by name. Raises `FormatError`."""
        others = [name for name in self.names if name not in self.matrices]
        return dict(self.matrices) | {name: tensor_shape(self.stored[name], name) for name in others}


def open_spqr_quant(
    folder: str | os.PathLike, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> SpqrQuantCheckpoint:
    """Open a checkpoint folder: config.json, and model.safetensors or its index and shards.

    `shapes` tells the shape of each quantised weight; None takes those of the model that config.json describes. Raises
    `FormatError`, naming the file, if one is missing, damaged or pickled, the layout is another, or a weight lacks one
    of its tensors or is none of the model's.
    """
    folder = path_of(folder)
    config = read_object(folder / CONFIG)
    _check_layout(folder / CONFIG, config.get("quantization_config"))
    stored = stored_tensors(folder)
    modules = dict.fromkeys(module for module, part in map(split, stored) if part)
    shapes = _model_shapes(folder, stored) if shapes is None else shapes
    for module in modules:
        file = next(stored[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in stored)
        if missing := [part for part in PARTS[:3] if f"{module}.{part}" not in stored]:
            raise FormatError(f"{file}: weight {module + '.weight'!r} lacks its tensor {module + '.' + missing[0]!r}")
        if len(shapes.get(f"{module}.weight", ())) != 2:
            raise FormatError(f"{file}: weight {module + '.weight'!r} is no matrix of the model in {folder / CONFIG}")
    return SpqrQuantCheckpoint(folder, config, stored, {f"{name}.weight": shapes[f"{name}.weight"] for name in modules})


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
            found = {f"{module}.{key}": own(tensor) for key, tensor in _named(name, weight).items()}
            files.add(found)
            quantised.add(module)
            shapes |= {f"{key}.shape": tensor.numel() for key, tensor in found.items()}
        if biased := [name for name in dense if name.endswith(".bias") and name.removesuffix(".bias") in quantised]:
            raise UserError(f"{biased[0]}: spqr_quant has no biases; leave this module's weight dense")
        files.close()
        kept = [name for name in dense if name.endswith(".weight")]
        entry = {"quant_method": METHOD, **LAYOUT, "shapes": shapes, "modules_to_not_convert": kept}
        write_config(part / CONFIG, {**config, "quantization_config": entry})


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


def split(name: str) -> tuple[str, str]:
    """Module and part of a quantised weight's tensor. The part of any other tensor is ""."""
    module, _, part = name.rpartition(".")
    return (module, part) if module and part in PARTS else (name, "")


def _named(name: str, packed: SpQRMatrix) -> dict[str, Tensor]:
    if not name.endswith(".weight"):
        raise UserError(f"cannot store {name!r} quantised; expected a name that ends in .weight")
    try:
        return to_tensors(packed)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _check_layout(path: Path, entry: object) -> None:
    if not isinstance(entry, dict) or entry.get("quant_method") != METHOD:
        raise FormatError(f"{path}: has no quantization_config with quant_method {METHOD!r}")
    for name, expected in LAYOUT.items():
        if entry.get(name, expected) != expected:
            raise FormatError(f"{path}: {name} is {line(entry[name])}; this code reads {expected}")


def _model_shapes(folder: Path, stored: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of the model that config.json describes."""
    config = read_config(folder, [tensor_shape(file, name) for name, file in stored.items()])
    vars(config).pop("quantization_config", None)
    found: dict[str, tuple[int, ...]] = {}

    def take(model) -> None:
        found.update({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})

    check_outline(config, take)
    return found
