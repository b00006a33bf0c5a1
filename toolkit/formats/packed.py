"""What all formats share: their contract, and how they are written to disk and read back.

A file is a safetensors file whose metadata hold the format's name and version, the matrix's shape and element type,
and one SHA-256 over all of it and the tensors.
"""

import dataclasses
import hashlib
import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.files import replacing

DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16, torch.int8)}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.int8: torch.int8}


class FormatError(UserError):
    """A file that does not hold what it should, or cannot be read: the message names file and reason."""


class Packed(ABC):
    """A packed matrix: a frozen dataclass of `shape` and tensors."""

    name: ClassVar[str]
    version: ClassVar[int] = 1

    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    @abstractmethod
    def encode(cls, weight: Tensor) -> Self:
        """Pack a matrix that `as_matrix` let through."""

    @abstractmethod
    def decode(self) -> Tensor:
        """The dense matrix, on the CPU."""

    @abstractmethod
    def check(self) -> None:
        """Raise `ValueError` with the reason unless the tensors agree with each other and with the shape."""

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """`nbytes` of such a matrix without making it. Raises `UserError` where it depends on the values."""
        raise UserError(f"the size of format {cls.name!r} depends on the values: encode a matrix to know it")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is stored, by name."""
        stored = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in stored.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored that depends on the matrix: values, positions, offsets; not the file's header."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def save(self, path: str | os.PathLike) -> None:
        """Write to `path`: first under a temporary name beside it, then renamed, so no half-written file is seen."""
        from safetensors.torch import save_file

        path = Path(path)
        metadata = {
            "format": self.name,
            "version": str(self.version),
            "shape": json.dumps(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        metadata["sha256"] = _checksum(metadata, self.tensors)
        with replacing(path) as temporary:
            save_file(self.tensors, temporary, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a file that `save` wrote. Raises `FormatError` for anything else, damaged or foreign."""
        return cls.from_file(path, *read(path))

    @classmethod
    def of_parts(cls, shape: tuple[int, int], dtype: torch.dtype, tensors: dict[str, Tensor]) -> Self:
        """An instance made of what is stored, without a copy. Raises `ValueError` or `TypeError` if it does not fit.

        Far cheaper than `check`: contents are not looked at, so they must come from where they cannot be wrong.
        """
        header = {"shape": shape, "dtype": dtype}
        names = {field.name for field in dataclasses.fields(cls)}
        packed = cls(**tensors, **{name: value for name, value in header.items() if name in names})
        if packed.dtype != dtype:
            raise ValueError(f"values are {packed.dtype}, the header says {str(dtype).removeprefix('torch.')}")
        return packed

    @classmethod
    def from_file(cls, path: str | os.PathLike, metadata: dict[str, str], tensors: dict[str, Tensor]) -> Self:
        """What `read(path)` found, as an instance of this format. Raises `FormatError` if it is not one."""
        if metadata["format"] != cls.name:
            raise FormatError(f"{path}: holds format {metadata['format']!r}; expected {cls.name!r}")
        if metadata["version"] != str(cls.version):
            raise FormatError(f"{path}: {cls.name} version {metadata['version']}; this code reads {cls.version}")
        try:
            rows, columns = json.loads(metadata["shape"])
            if not all(type(size) is int and size >= 0 for size in (rows, columns)):
                raise ValueError(f"shape {metadata['shape']}")
            packed = cls.of_parts((rows, columns), DTYPES[metadata["dtype"]], tensors)
            packed.check()
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
            raise FormatError(f"{path}: inconsistent {cls.name} file: {' '.join(str(error).split())}") from error
        return packed


def as_matrix(weight: Tensor) -> Tensor:
    """The weight as a contiguous matrix on the CPU. Raises `UserError` for what no format holds."""
    if not isinstance(weight, Tensor):
        raise UserError(f"cannot pack a {type(weight).__name__}; expected a torch.Tensor")
    if weight.ndim != 2:
        raise UserError(f"cannot pack a tensor of shape {list(weight.shape)}; expected 2 dimensions")
    if weight.dtype not in BITS or weight.layout != torch.strided or weight.is_meta:
        kind = "meta tensor" if weight.is_meta else f"{weight.layout} tensor of {weight.dtype}"
        raise UserError(f"cannot pack a {kind}; expected a strided one of {', '.join(DTYPES)}")
    return weight.detach().cpu().contiguous()


def bits(tensor: Tensor) -> Tensor:
    """The same memory as signed integers of the elements' width: comparing and copying these is exact."""
    return tensor.view(BITS[tensor.dtype])


def non_zero(matrix: Tensor) -> Tensor:
    """Where elements are not zero (−0.0 is; subnormals are not, whatever the processor is told to do with them)."""
    if matrix.dtype == torch.int8:
        return matrix != 0
    return bits(matrix) & torch.iinfo(BITS[matrix.dtype]).max != 0


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` if a stored tensor is not what the format says."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")


def read(path: str | os.PathLike) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file, checksum verified. Raises `FormatError`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if missing := {"format", "version", "shape", "dtype", "sha256"} - metadata.keys():
                raise FormatError(f"{path}: not a packed matrix: its header lacks {', '.join(sorted(missing))}")
            # cloned: the library's tensors are views of the file, and would change or fault with it
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FormatError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise FormatError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if _checksum(metadata, tensors) != metadata["sha256"]:
        raise FormatError(f"{path}: damaged: its contents do not match their checksum; make the file again")
    return metadata, tensors


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    described = {name: value for name, value in metadata.items() if name != "sha256"}
    described["tensors"] = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
