"""A GGUF file in another mixture of llama.cpp's types, as its tool `llama-quantize --allow-requantize` makes one.

    requantise(Path("model-Q4_K_M.gguf"), Path("model-Q2_K.gguf"), "Q2_K")
    requantise(Path("model-Q4_K_M.gguf"), Path("model-IQ3_S.gguf"), "IQ3_S", importance(model, windows))

Everything but the matrices is copied, so llama.cpp runs the file as it ran the first one, whatever the architecture.
The decoded weights of the first file count as the model, since there is no better copy of it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError
from toolkit.files import check_space, replacing
from toolkit.measure.llama_cpp_quantiser import GgufMatrix
from toolkit.models.gguf_header import LAYERS, GgufHeader, read_header
from toolkit.progress import progress
from toolkit.records import line
from toolkit.studies.mixtures import Importance, tensor_type

HALF = "F16"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROUTER = "ffn_gate_inp"  # stays as it is
FILE_TYPE = "general.file_type"
COMPUTED = ("GGUF.", "general.architecture", FILE_TYPE, "split.")  # keys that the writer gives itself
MOST_BYTES = 2  # of a weight: F16 is the largest type


def requantise(source: Path, target: Path, mixture: str, weights: Importance | None = None) -> None:
    """Write the model of a GGUF file in a mixture of `toolkit.studies.mixtures`, or in "F16".

    `weights` is an importance matrix, which `importance` makes of the model in memory. Matrices get the types of a
    Llama decoder by their names; other names get the type that most matrices have. Raises `UserError` for a file that
    cannot be read, for what `tensor_type` refuses, or a disk that is too small.
    """
    import gguf

    header = read_header(source)
    kinds = {name: kind for name in header.tensors if (kind := _kind(header, name, mixture, weights is not None))}
    check_space(target.parent, header.weights * MOST_BYTES)
    try:
        readers = [gguf.GGUFReader(file) for file in header.files]
    except Exception as error:  # whatever fails in a foreign file
        raise UserError(f"{source}: cannot be read as a GGUF file: {line(error)}") from error
    with replacing(target) as temporary:
        writer = gguf.GGUFWriter(temporary, str(header.architecture))
        for field in readers[0].fields.values():
            if not field.name.startswith(COMPUTED):
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{mixture}"])
        _write_tensors(writer, [tensor for reader in readers for tensor in reader.tensors], kinds, weights or {})
        writer.close()


def _kind(header: GgufHeader, name: str, mixture: str, weighted: bool) -> str | None:
    """The type that a tensor gets; None for one that stays as it is: vectors and routers."""
    shape = header.tensors[name].shape
    if len(shape) < 2 or ROUTER in name:
        return None
    if mixture == HALF:
        return HALF
    layers, heads = header.size("block_count"), header.size("attention.head_count")
    layer, tensor = 0, name.removesuffix(".weight")
    if name.startswith(LAYERS):
        number, tensor = tensor.removeprefix(LAYERS).split(".", 1)
        layer = int(number)
    elif name == EMBEDDING and HEAD not in header.tensors:
        tensor = "output"  # it is the head, too
    sharing = heads // (header.size("attention.head_count_kv") or heads)
    return tensor_type(mixture, tensor.removesuffix("_exps"), layer, layers, shape[-1], sharing, weighted)


def _write_tensors(writer, tensors: Sequence[Any], kinds: Mapping[str, str], weights: Importance) -> None:
    """One tensor at a time is in memory."""
    import gguf

    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[kinds[tensor.name]] if tensor.name in kinds else tensor.tensor_type
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape, values = tensor.shape[::-1].tolist(), np.dtype(np.float32)  # the shape counts values, not bytes
        writer.add_tensor_info(tensor.name, shape, values, tensor.n_elements // block * block_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with progress("tensors", len(tensors), "tensors") as bar:
        for tensor in tensors:
            kind = kinds.get(tensor.name)
            data = tensor.data if kind is None else _converted(tensor, kind, weights.get(tensor.name))
            writer.write_tensor_data(data)
            bar.update()


def _converted(tensor, kind: str, importance: Tensor | None) -> np.ndarray:
    """The blocks of a tensor in another type, quantised by all cores; a tensor of this type stays as it is."""
    import gguf

    if tensor.tensor_type.name == kind:
        return tensor.data
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    pieces = np.array_split(rows, 4 * torch.get_num_threads())

    def convert(piece: np.ndarray) -> np.ndarray:
        values: Float[np.ndarray, "rows columns"] = gguf.quants.dequantize(piece, tensor.tensor_type)
        if kind == HALF:
            return values.astype(np.float16)
        return GgufMatrix.encode(torch.tensor(values), kind, importance).data

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return np.concatenate(list(pool.map(convert, [piece for piece in pieces if len(piece)])))
