"""The files of a checkpoint: config.json, model.safetensors or its index and shards. No code in them is executed."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.errors import UserError
from toolkit.files import check_memory
from toolkit.formats import FormatError
from toolkit.formats.endor import Endor
from toolkit.formats.sparse_bitmask import SparseBitmask
from toolkit.formats.spqr import SpQRMatrix
from toolkit.models.weight_map import INDEX, weight_map
from toolkit.records import line, load_json, regular_size

SINGLE = "model.safetensors"
PICKLED = (".pt", ".pth", ".bin")
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An open checkpoint. It holds names and shapes only and reads a tensor on request.

    The tensors `m.<part>` hold the packed weight of a module `m`, named `m.weight` here, as the model names it. If a
    `sparse-bitmask` checkpoint is also quantised, only the sparse packing is undone: its scales are ordinary tensors
    and its weights stay quantised.
    """

    folder: Path
    config: dict  # of config.json
    stored: Mapping[str, Path]  # name of a stored tensor -> file that holds it
    parts: tuple[str, ...]
    matrices: Mapping[str, tuple[int, ...]]  # name of a packed weight, in stored order -> its shape
    unpack: Callable[[Mapping[str, Tensor], Any], SparseBitmask | SpQRMatrix]  # of parts and shape

    @property
    def packed_names(self) -> list[str]:
        """The weights that are stored packed, in stored order."""
        return list(self.matrices)

    @property
    def names(self) -> list[str]:
        """All tensors by the names that the model gives them: the packed weights, then the others."""
        return self.packed_names + [name for name in self.stored if not module_of(name, self.parts)]

    def tensor(self, name: str) -> Tensor:
        """One tensor, dense. Raises `UserError` for an unknown name, `FormatError` if it is damaged."""
        with TensorFiles() as files:
            return self._dense(name, files)

    def packed(self, name: str) -> Endor | SpQRMatrix:
        """One packed weight, in the form that its kernels take; a weight of spqr_quant is fp16.

        Raises `UserError` for a name that is unknown or not packed, or elements of a type that `Endor` does not hold;
        `FormatError` if it is damaged.
        """
        with TensorFiles() as files:
            found = self._read(name, files)
        return found.to_endor() if isinstance(found, SparseBitmask) else found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, dense, one after the other. Only one is in memory at a time, unless the caller keeps them."""
        with TensorFiles() as files:
            for name in self.names:
                yield name, self._dense(name, files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor when dense, by name, from the files' headers. Raises `FormatError`."""
        others = {name: self.stored[name] for name in self.names if name not in self.matrices}
        return dict(self.matrices) | stored_shapes(others)

    def _dense(self, name: str, files: "TensorFiles") -> Tensor:
        if name in self.stored:
            return files.tensor(self.stored[name], name).clone()  # the library's tensors are views of the file
        return self._read(name, files).decode()

    def _read(self, name: str, files: "TensorFiles") -> SparseBitmask | SpQRMatrix:
        if name not in self.matrices:
            kind = "is not packed" if name in self.stored else "does not exist"
            raise UserError(f"{self.folder}: tensor {name!r} {kind}; the names are in .names and .packed_names")
        named = {part: f"{name.removesuffix('.weight')}.{part}" for part in self.parts}
        held = {part: self.stored[key] for part, key in named.items() if key in self.stored}
        tensors = {part: files.tensor(file, named[part]).clone() for part, file in held.items()}
        try:
            return self.unpack(tensors, self.matrices[name])
        except (ValueError, RuntimeError) as error:
            raise FormatError(f"{held[self.parts[1]]}: inconsistent weight {name!r}: {line(error)}") from error


class TensorFiles(contextlib.AbstractContextManager):
    """Safetensors files that stay open in a block.

    A header may name a hundred thousand tensors, and takes a second to parse. So each file is opened once.
    """

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def __exit__(self, *error) -> None:
        """Close them."""
        self._files.clear()

    def names(self, path: Path) -> list[str]:
        """The tensors of a file. Raises `FormatError` if it is damaged."""
        with _readable(str(path)):
            return self._open(path).keys()

    def tensor(self, path: Path, name: str) -> Tensor:
        """One tensor, a view of the file. Raises `FormatError` if it is damaged."""
        with _readable(f"{path}: tensor {name!r}"):
            return self._open(path).get_tensor(name)

    def shape(self, path: Path, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header. Raises `FormatError` if it is damaged."""
        with _readable(f"{path}: tensor {name!r}"):
            return tuple(self._open(path).get_slice(name).get_shape())

    def _open(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._files:
            check_memory(regular_size(path), str(path))
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    """Turn an error of a damaged file into a `FormatError` that names `what`."""
    from safetensors import SafetensorError

    try:
        yield
    except UserError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise FormatError(f"{what} cannot be read: {line(error)}") from error


def module_of(name: str, parts: Sequence[str]) -> str:
    """The module whose packed weight a tensor is a part of; "" for any other tensor."""
    module, _, part = name.rpartition(".")
    return module if part in parts else ""


def packed_modules(stored: Mapping[str, Path], parts: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Path]:
    """The modules whose weights are packed, in stored order, each with its file.

    Raises `FormatError` for one that lacks a part, unless the part is optional.
    """
    found = {module: file for name, file in stored.items() if (module := module_of(name, parts))}
    for module, file in found.items():
        for part in parts:
            if part not in optional and f"{module}.{part}" not in stored:
                raise FormatError(f"{file}: weight '{module}.weight' lacks its tensor '{module}.{part}'")
    return found


def stored_tensors(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor. Raises `FormatError` if there is none, one is damaged, or the index is wrong."""
    if (folder / SINGLE).exists():
        return names_in(folder / SINGLE)
    pickled = min((file for file in folder.glob("*") if file.suffix in PICKLED), default=None)
    if pickled and not (folder / INDEX).exists():
        raise FormatError(
            f"{pickled}: pickled, and reading it could run code; where you trust it, make {SINGLE} of it with "
            "safetensors.torch.save_file(torch.load(...))"
        )
    return _in_shards(folder / INDEX)


def names_in(path: Path) -> dict[str, Path]:
    """The tensors of one file, each with the file. Raises `FormatError` if it is damaged."""
    with TensorFiles() as files:
        return dict.fromkeys(files.names(path), path)


def stored_shapes(stored: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in its file. Raises `FormatError` if one is damaged."""
    with TensorFiles() as files:
        return {name: files.shape(path, name) for name, path in stored.items()}


def _in_shards(index: Path) -> dict[str, Path]:
    if not index.exists():
        raise FormatError(f"{index.parent}: holds neither {SINGLE} nor {INDEX}")
    places = weight_map(index, FormatError)
    held: dict[str, Mapping[str, Path]] = {}
    for name, shard in places.items():
        if shard not in held:
            if not (index.parent / shard).is_file():
                raise FormatError(f"{index}: names {shard!r}, which does not exist")
            held[shard] = names_in(index.parent / shard)
        if name not in held[shard]:
            raise FormatError(f"{index.parent / shard}: lacks tensor {name!r}, which {INDEX} says it holds")
    return {name: index.parent / shard for name, shard in places.items()}


def read_object(path: Path) -> dict:
    """A JSON object. Raises `FormatError` for anything else."""
    found = load_json(path, FormatError)
    if not isinstance(found, dict):
        raise FormatError(f"{path}: holds no JSON object")
    return found


def own(tensor: Tensor) -> Tensor:
    """The tensor with memory of its own, as safetensors asks."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Shards:
    """The safetensors files of one checkpoint. At most one of them is in memory."""

    def __init__(self, folder: Path, limit_bytes: int):
        self.folder, self.limit_bytes = folder, limit_bytes
        self.held: dict[str, Tensor] = {}
        self.number_of: dict[str, int] = {}  # tensor -> file
        self.count = self.total_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors that stay in one file. Raises `UserError` for a name that was added before."""
        if taken := self.number_of.keys() & tensors.keys():
            raise UserError(f"two tensors are named {min(taken)!r}")
        if self.held and _nbytes(self.held) + _nbytes(tensors) > self.limit_bytes:
            self._flush()
        self.held |= tensors
        self.number_of |= dict.fromkeys(tensors, self.count)
        self.total_bytes += _nbytes(tensors)

    def close(self) -> None:
        """Write what is left, give all files their final names, and the index if there are several."""
        self._flush()
        several = [f"model-{number:05}-of-{self.count:05}.safetensors" for number in range(1, self.count + 1)]
        final = several if self.count > 1 else [SINGLE]
        for number, name in enumerate(final):
            os.replace(self._part(number), self.folder / name)
        if self.count > 1:
            places = {name: final[number] for name, number in self.number_of.items()}
            write_object(self.folder / INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": places})

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self.held, self._part(self.count), {"format": "pt"})
        self.held, self.count = {}, self.count + 1

    def _part(self, number: int) -> Path:
        return self.folder / f"{number}.part"


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def write_object(path: Path, value: dict) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
