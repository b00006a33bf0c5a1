"""The header of a GGUF file, which describes its model: read in a tenth of a second, whatever the size of the file.

    header = read_header(Path("model.gguf"))
    header.tensors["blk.0.ffn_up.weight"].nbytes

The reader of the package `gguf` takes 13 seconds for a vocabulary of 150 thousand words, each of which becomes an
array; here long arrays are skipped. Anyone may have written a file: sizes are bounded by what it holds. The pieces
that llama-gguf-split writes are one model, whichever of them is named.
"""

import contextlib
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from toolkit.errors import UserError
from toolkit.records import line, regular_size

LONGEST = 4096  # numbers of an array that is read: one or a few a block, not a token's scores
LARGE = 10**9  # weights; a copy of so many or more is kept in bfloat16
VERSIONS = (2, 3)
PIECE = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")  # as llama-gguf-split names them
SIZES = re.compile(r"_(count|length)$(?<!context_length)")  # a context may be longer than anything in the file
LAYERS = "blk."  # how the names of the decoder blocks' tensors begin
# tensors of factors that divide the frequencies of rotary embeddings: of all texts, or of short and of long ones
ROTARY, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: its shape (rows, columns), the type of its blocks (such as "Q4_K"), where it begins, and its bytes."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int
    file: Path


@dataclass(frozen=True)
class GgufHeader:
    """The scalars and short arrays of numbers of a model by their key, and its tensors by their name."""

    file: Path
    """The file, or the first of its pieces, which holds the metadata and the tokenizer."""
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> object:
        """The architecture's name in the file; None without one."""
        return self.metadata.get("general.architecture")

    @property
    def files(self) -> list[Path]:
        """The files that hold the model, the first piece first."""
        return sorted({self.file, *(tensor.file for tensor in self.tensors.values())})

    @property
    def blocks(self) -> int:
        """The number of decoder blocks that there are tensors of."""
        return len({name.split(".")[1] for name in self.tensors if name.startswith(LAYERS)})

    @property
    def weights(self) -> int:
        """The number of weights in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def dtype(self) -> str:
        """The type of dense weights and of a key-value cache: "float32", or of large models "bfloat16"."""
        return "float32" if self.weights < LARGE else "bfloat16"

    @property
    def quantisation(self) -> str:
        """The type that the file names, such as "Q4_K_M"; else the type that most of its weights have."""
        from gguf import LlamaFileType

        with contextlib.suppress(ValueError):
            name = LlamaFileType(self.metadata.get("general.file_type")).name
            return name.removeprefix("MOSTLY_").removeprefix("ALL_")
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.kind] += prod(tensor.shape)
        return counts.most_common(1)[0][0]

    def size(self, key: str) -> object:
        """A value of the architecture's, such as `block_count`; None if the file does not give it.

        An array of one value a block is that value if all are the same.
        """
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value[0] if isinstance(value, list) and value and value == value[:1] * len(value) else value


def read_header(file: Path) -> GgufHeader:
    """The header of a GGUF file, or of all pieces of a split one, of which `file` is any.

    Raises `UserError` for a file that is no GGUF file, is cut short or is of another version, for a piece that is
    missing or belongs to another model, and for sizes that its tensors do not have.
    """
    header = _read(file)
    if header.metadata.get("split.count", 1) != 1:
        header = _joined(header)
    _check_sizes(header)
    return header


def _joined(named: GgufHeader) -> GgufHeader:
    """The model of all pieces, given the header of one. llama-gguf-split puts the metadata into the first."""
    count, name = named.metadata["split.count"], PIECE.fullmatch(named.file.name)
    if name is None or int(name["count"]) != count:
        raise UserError(
            f"{named.file}: one of {count!r:.40} pieces of a model, but its name does not say which; expected a name "
            "that llama-gguf-split gives, such as model-00001-of-00002.gguf"
        )
    files = [named.file.with_name(f"{name['stem']}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    if missing := [file.name for file in files if not file.exists()]:
        raise UserError(
            f"{named.file}: one of {count} pieces of a model (llama-gguf-split); {len(missing)} of them, such as "
            f"{missing[0]}, are not beside it"
        )
    pieces = [_read(file) for file in files]
    for number, piece in enumerate(pieces):
        if (piece.metadata.get("split.no"), piece.metadata.get("split.count")) != (number, count):
            raise UserError(f"{piece.file}: its header says that it is another piece than its name (llama-gguf-split)")
    tensors = {name: tensor for piece in pieces for name, tensor in piece.tensors.items()}
    total = pieces[0].metadata.get("split.tensors.count", len(tensors))
    if not total == len(tensors) == sum(len(piece.tensors) for piece in pieces):
        raise UserError(
            f"{named.file}: its {count} pieces hold {len(tensors)} different tensors, and the first piece says "
            f"{total!r:.40}; they are pieces of different files (llama-gguf-split)"
        )
    return replace(pieces[0], tensors=tensors)


class _DamagedError(Exception):
    """The fault of a file that is no whole GGUF file."""


def _read(file: Path) -> GgufHeader:
    """The header of one file."""
    try:
        if not regular_size(file):
            raise _DamagedError("it is empty")
        now = file.stat()
        return _parse(file, (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))
    except Exception as error:  # whatever fails in a foreign file
        known = isinstance(error, _DamagedError)
        fault = error if known else getattr(error, "strerror", None) or "it is cut short or damaged"
        raise UserError(f"{file}: cannot be read as a GGUF file: {line(fault)}") from error


@lru_cache(maxsize=16)  # a command asks for a header several times
def _parse(file: Path, state: tuple[int, ...]) -> GgufHeader:
    """The header of a file in this state: another state is another file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs, raw_type):
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            (kind,), (count,) = self._get(orig_offs, "<u4"), self._get(orig_offs + 4, "<u8")
            at, scalar, length = orig_offs + 12, self.gguf_scalar_to_np.get(GGUFValueType(kind)), struct.Struct("<Q")
            if scalar is not None and count <= LONGEST:
                return super()._get_field_parts(orig_offs, raw_type)
            if scalar is not None:
                at += int(count) * scalar().itemsize
            elif kind != GGUFValueType.STRING:
                raise _DamagedError("arrays of arrays")
            else:
                for _ in range(count):
                    at += 8 + length.unpack_from(self.data, at)[0]
            return at - orig_offs, [], [], [GGUFValueType.ARRAY]

        def _build_tensors(self, start_offs, fields):
            self.found = {}
            for field in fields:
                *_, dims, (kind,), (offset,) = field.parts
                shape, offset = tuple(dims.tolist())[::-1], int(start_offs + offset)
                elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
                nbytes *= prod(shape) // elements
                if offset + nbytes > len(self.data):
                    raise _DamagedError(f"it is cut short: its tensors need more than its {len(self.data):,} bytes")
                if shape and shape[-1] % elements:
                    raise _DamagedError(f"a row of {field.name!r:.99} is no whole number of blocks")
                if field.name in self.found:
                    raise _DamagedError(f"two tensors have the name {field.name!r:.99}")
                self.found[field.name] = GgufTensor(shape, GGMLQuantizationType(kind).name, offset, nbytes, file)

    with open(file, "rb") as source:
        start = source.read(8)
    if start[:4] != b"GGUF":
        raise _DamagedError("it does not begin with the letters GGUF")
    if len(start) == 8 and (version := int.from_bytes(start[4:], "little")) not in VERSIONS:
        raise _DamagedError(f"it has version {version}; expected 2 or 3, little-endian")
    reader = Reader(file)
    fields = (it for it in reader.fields.values() if not it.name.startswith("GGUF."))
    short = (it for it in fields if it.types != [GGUFValueType.ARRAY])
    return GgufHeader(file, {it.name: it.contents() for it in short}, reader.found)


def _check_sizes(header: GgufHeader) -> None:
    """Raise `UserError` for counts and lengths that are no whole numbers, or larger than anything in the file."""
    most = max([len(header.tensors), *(size for tensor in header.tensors.values() for size in tensor.shape)], default=0)
    for key, value in header.metadata.items():
        is_size = key.startswith(f"{header.architecture}.") and SIZES.search(key)
        sizes = value if isinstance(value, list) else [value]
        if is_size and not all(type(size) is int and 0 <= size <= most for size in sizes):
            raise UserError(f"{header.file}: {line(key)} is {value!r:.40}; expected a whole number from 0 to {most}")


def decoded(tensor: GgufTensor) -> Float32[np.ndarray, "*shape"]:
    """The values of a small tensor, in its own shape."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    data = np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.offset)
    rows = prod(tensor.shape[:-1])
    return np.asarray(dequantize(data.reshape(rows, -1), GGMLQuantizationType[tensor.kind])).reshape(tensor.shape)
