"""The files of a checkpoint: config.json, model.safetensors or its index and shards. No code in them is executed."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.errors import UserError
from toolkit.files import check_memory
from toolkit.formats import FormatError
from toolkit.records import line, load_json, regular_size

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".pt", ".pth", ".bin")


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
    with _opened(path, str(path)) as file:
        return dict.fromkeys(file.keys(), path)


def _in_shards(index: Path) -> dict[str, Path]:
    if not index.exists():
        raise FormatError(f"{index.parent}: holds neither {SINGLE} nor {INDEX}")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise FormatError(f"{index}: has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise FormatError(f"{index}: weight_map/{name} is {line(shard)}; expected the name of a file")
    shards = {shard: names_in(_shard(index, shard)) for shard in dict.fromkeys(weight_map.values())}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise FormatError(f"{index.parent / shard}: lacks tensor {name!r}, which {INDEX} says it holds")
    return {name: index.parent / shard for name, shard in weight_map.items()}


def _shard(index: Path, name: str) -> Path:
    if Path(name).name != name:
        raise FormatError(f"{index}: names {name!r}; expected the name of a file beside it")
    if not (index.parent / name).is_file():
        raise FormatError(f"{index}: names {name!r}, which does not exist")
    return index.parent / name


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor, a view of the file. Raises `FormatError` if it is damaged."""
    with _opened(path, f"{path}: tensor {name!r}") as file:
        return file.get_tensor(name)


def tensor_shape(path: Path, name: str) -> tuple[int, ...]:
    """The shape of a tensor, from the file's header. Raises `FormatError` if it is damaged."""
    with _opened(path, f"{path}: tensor {name!r}") as file:
        return tuple(file.get_slice(name).get_shape())


@contextlib.contextmanager
def _opened(path: Path, what: str) -> Iterator[Any]:
    """Open a safetensors file. Errors become a `FormatError` that names `what`."""
    from safetensors import SafetensorError, safe_open

    try:
        check_memory(regular_size(path), str(path))
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise FormatError(f"{what} cannot be read: {line(error)}") from error


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
        final = [f"model-{number:05}-of-{self.count:05}.safetensors" for number in range(1, self.count + 1)]
        if self.count == 1:
            final = [SINGLE]
        for number, name in enumerate(final):
            os.replace(self._part(number), self.folder / name)
        if self.count > 1:
            weight_map = {name: final[number] for name, number in self.number_of.items()}
            write_object(self.folder / INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map})

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
