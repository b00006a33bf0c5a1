"""The header of a GGUF file, which describes its model: read in a tenth of a second, whatever the size of the file.

    header = read_header(Path("model.gguf"))
    header.tensors["blk.0.ffn_up.weight"].nbytes
    gguf_shape(header)

The reader of the package `gguf` takes 13 seconds for a vocabulary of 150 thousand words, each of which becomes an
array; here arrays are skipped. Anyone may have written a file: sizes are bounded by what it holds.
"""

import contextlib
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from toolkit.errors import UserError
from toolkit.models.architectures import ModelShape
from toolkit.models.shape_of import BlockSizes, assemble
from toolkit.records import line, regular_size

SIZES = re.compile(r"_(count|length)$(?<!context_length)")  # a context may be longer than anything in the file
LAYERS = "blk."  # how the names of the decoder blocks' tensors begin
FFN = "ffn_"  # how the names of their FFNs begin
FUSED_GATE = ("phi3", "chatglm", "glm4")  # architectures whose up projection holds the gate's rows, too


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: its shape (rows, columns), the type of its blocks (such as "Q4_K"), where it begins, and its bytes."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The scalars of a file by their key, and its tensors by their name. Arrays are left out."""

    file: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> object:
        """The architecture's name in the file; None without one."""
        return self.metadata.get("general.architecture")

    @property
    def weights(self) -> int:
        """The number of weights in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

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
        """A value of the architecture's, such as `block_count`; None if the file does not give it."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_header(file: Path) -> GgufHeader:
    """The header of a GGUF file.

    Raises `UserError` for a file that is no GGUF file, is cut short or is of another version, and for sizes that its
    tensors do not have.
    """
    try:
        if not regular_size(file):
            raise ValueError("it is empty")
        header = _read(file)
    except Exception as error:  # whatever fails in a foreign file
        fault = error if type(error) is ValueError else getattr(error, "strerror", None) or "it is cut short or damaged"
        raise UserError(f"{file}: cannot be read as a GGUF file: {line(fault)}; expected version 2 or 3") from error
    _check_sizes(header)
    return header


def _read(file: Path) -> GgufHeader:
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs, raw_type):
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            (kind,), (count,) = self._get(orig_offs, "<u4"), self._get(orig_offs + 4, "<u8")
            at, scalar, length = orig_offs + 12, self.gguf_scalar_to_np.get(GGUFValueType(kind)), struct.Struct("<Q")
            if scalar is not None:
                at += int(count) * scalar().itemsize
            elif kind != GGUFValueType.STRING:
                raise ValueError("arrays of arrays")
            else:
                for _ in range(count):
                    at += 8 + length.unpack_from(self.data, at)[0]
            return at - orig_offs, [], [], [GGUFValueType.ARRAY]

    reader = Reader(file)
    tensors = {
        it.name: GgufTensor(tuple(it.shape.tolist())[::-1], it.tensor_type.name, it.data_offset, it.n_bytes)
        for it in reader.tensors
    }
    fields = (it for it in reader.fields.values() if not it.name.startswith("GGUF."))
    scalars = (it for it in fields if it.types[0] != GGUFValueType.ARRAY)
    return GgufHeader(file, {it.name: it.contents() for it in scalars}, tensors)


def _check_sizes(header: GgufHeader) -> None:
    """Raise `UserError` for counts and lengths that are no whole numbers, or larger than anything in the file."""
    most = max([len(header.tensors), *(size for tensor in header.tensors.values() for size in tensor.shape)], default=0)
    for key, value in header.metadata.items():
        is_size = key.startswith(f"{header.architecture}.") and SIZES.search(key)
        if is_size and not (type(value) is int and 0 <= value <= most):
            raise UserError(f"{header.file}: {line(key)} is {value!r:.40}; expected a whole number from 0 to {most}")


def gguf_shape(header: GgufHeader) -> ModelShape:
    """The sizes of the model in a file. Raises `UserError`, which names the architecture, as `assemble` does."""
    try:
        return _shape(header)
    except Exception as error:  # whatever fails in a foreign file
        reason = error if isinstance(error, UserError) else "its sizes do not fit together"
        raise UserError(f"{header.file}: architecture {header.architecture!r:.99}: {reason}") from error


def _shape(header: GgufHeader) -> ModelShape:
    pieces = header.metadata.get("split.count", 1)
    if pieces != 1:
        raise UserError(f"one of {pieces} files; join them with llama-gguf-split --merge")
    embedding = header.tensors.get("token_embd.weight")
    heads, count = header.size("attention.head_count"), header.size("block_count")
    if embedding is None or not heads or not count:
        raise UserError("expected a token embedding, and how many heads and blocks there are")
    hidden = embedding.shape[1]
    matrices: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, tensor in header.tensors.items():
        part, _, rest = name.removeprefix(LAYERS).partition(".")
        if name.startswith(LAYERS) and part.isdecimal():
            matrices.setdefault(int(part), {})[rest.removesuffix(".weight")] = tensor.shape
    if sorted(matrices) != list(range(count)):
        raise UserError(f"expected tensors of blocks 0 to {count - 1}")
    fused = header.architecture in FUSED_GATE
    return assemble(
        [_block(matrices[number], fused) for number in sorted(matrices)],
        [tensor.shape for tensor in header.tensors.values()],
        hidden=hidden,
        vocabulary=embedding.shape[0],
        tied="output.weight" not in header.tensors,
        heads=heads,
        per_token=header.size("expert_used_count") or 0,
    )


def _block(matrices: Mapping[str, tuple[int, ...]], fused: bool) -> BlockSizes:
    attention = tuple(it[:2] for name, it in matrices.items() if len(it) == 2 and not name.startswith(FFN))
    down, shared = matrices.get("ffn_down_exps"), matrices.get("ffn_down_shexp", (0, 0))
    if down:
        return BlockSizes(attention, experts=down[0], expert_ffn=down[2], shared_ffn=shared[1])
    if "ffn_down" not in matrices:
        raise UserError("a block has no ffn_down")
    return BlockSizes(attention, matrices["ffn_down"][1], fused or "ffn_gate" in matrices)
