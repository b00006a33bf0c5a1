"""Tensors and a few words about them in one safetensors file, with a checksum over all of it.

    save("trace.safetensors", "activation trace", {"model": "opt"}, tensors)
    about, tensors = load("trace.safetensors", "activation trace")

Anyone may have written a file: `load` takes no more memory than there is, runs no code, and refuses damaged files.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from toolkit.errors import UserError
from toolkit.files import check_memory, path_of, replacing
from toolkit.records import line, regular_size

if TYPE_CHECKING:
    from torch import Tensor

KIND, CHECKSUM = "kind", "sha256"
TYPES = {
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"),
    *("uint32", "uint16", "uint8", "bool"),
}
AGAIN = "make the file again"


def save(path: str | os.PathLike, kind: str, about: Mapping[str, str], tensors: Mapping[str, "Tensor"]) -> None:
    """Replace a file by tensors and words about them. `kind` distinguishes files of different contents.

    Tensors that share memory are each stored. Raises `UserError` for trouble with the disk.
    """
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {}
    places = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if place in places else plain  # the library refuses shared memory
        places.add(place)
    metadata = {**about, KIND: kind}
    with replacing(path_of(path)) as temporary:
        save_file(stored, temporary, metadata | {CHECKSUM: checksum(metadata, stored)})


def load(path: str | os.PathLike, kind: str) -> tuple[dict[str, str], dict[str, "Tensor"]]:
    """The metadata of a file's tensors, and the tensors.

    Raises `UserError` for a file that cannot be read, does not fit into memory, is of another kind or was altered, and
    for tensors of types that no file of ours has, or with numbers that are not finite.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_memory(regular_size(path_of(path)), str(path))
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if (found := metadata.get(KIND)) != kind:
                other = line(found) if found else "tensors of another program"
                raise UserError(f"{path}: holds {other}; expected: {kind}")
            # the library's tensors are views of the file; a copy stays good if the file changes
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except UserError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{path}: cannot be read: {line(error)}") from error
    if checksum(metadata, tensors) != metadata.get(CHECKSUM):
        raise UserError(f"{path}: damaged: its contents do not match their checksum; {AGAIN}")
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in TYPES or not tensor.isfinite().all():
            raise UserError(f"{path}: {line(name)}, {dtype}: expected real and finite numbers; {AGAIN}")
    return {name: value for name, value in metadata.items() if name not in (KIND, CHECKSUM)}, tensors


def load_for(
    path: str | os.PathLike, kind: str, versions: Collection[str], model: str
) -> tuple[dict[str, str], dict[str, "Tensor"]]:
    """As `load`, for a file about one model, which was saved with its `version` and the name of its `model`.

    Raises `UserError` as `load` does, and for a file of a version not among these or about another model.
    """
    about, tensors = load(path, kind)
    if (version := about.get("version")) not in versions:
        readable = ", ".join(versions)
        raise UserError(f"{path}: {kind} of version {version!r:.99}; this code reads {readable}: {AGAIN}")
    if (name := about.get("model")) != model:
        raise UserError(f"{path}: {kind} of model {name!r:.99}; expected {model!r}: make a file for this model")
    return about, tensors


@contextmanager
def consistent(path: str | os.PathLike, kind: str) -> Iterator[None]:
    """Inside the block, parts of a file are put together. Any fault is a `UserError` that names the file."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        reason = f"{line(error)} is missing" if isinstance(error, KeyError) else line(error)
        raise UserError(f"{path}: inconsistent {kind}: {reason}; {AGAIN}") from error


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, "Tensor"]) -> str:
    """SHA-256 over the metadata, its own entry left out, and over the names, types, shapes and bytes of the tensors."""
    import torch

    described: dict[str, object] = {name: value for name, value in metadata.items() if name != CHECKSUM}
    described["tensors"] = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
