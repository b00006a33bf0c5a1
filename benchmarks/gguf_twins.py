"""GGUF files with the shapes and block types of large models, and random blocks: for timing alone.

    write_twin("llama2-7b", Path("llama2-7b.gguf"))

A tensor is made and written at a time, so a file of 12 GB takes little memory. The speed of products and reads does not
depend on the values of weights; the experts that a router of random weights chooses are random, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf_files import Case, add_words, describe, tensors

from toolkit.formats.twins import random_blocks
from toolkit.hub import NO_CODE
from toolkit.progress import progress

ROWS = 1 << 14  # made at a time
ALIGNMENT = 32  # of tensors in the file, in bytes


@dataclass(frozen=True)
class Twin:
    """A case of real sizes, the type of most matrices, and the file's type by the name of llama.cpp."""

    case: Case
    kind: str
    mixed: bool = False
    """Whether some matrices have more bits, as llama-quantize's Q4_K_M chooses them."""


TWINS = {
    "llama2-7b": Twin(
        Case(
            "llama",
            "llama",
            {
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "max_position_embeddings": 4096,
            },
        ),
        "Q4_K",
        mixed=True,
    ),
    "mistral-large": Twin(
        Case(
            "llama",
            "llama",
            {
                "vocab_size": 32768,
                "hidden_size": 12288,
                "intermediate_size": 28672,
                "num_hidden_layers": 88,
                "num_attention_heads": 96,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 4096,
            },
        ),
        "Q8_0",
    ),
    "gpt-oss-20b": Twin(
        Case(
            "gpt-oss",
            "gpt_oss",
            {
                "vocab_size": 201088,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_hidden_layers": 24,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "max_position_embeddings": 4096,
            },
        ),
        "MXFP4",
    ),
}


def write_twin(name: str, file: Path, sparse: bool = False) -> None:
    """Write the twin of a model of `TWINS`; `sparse` leaves holes in place of its weights, which take no disk."""
    twin = TWINS[name]
    config = transformers.AutoConfig.for_model(twin.case.model_type, **twin.case.all_fields())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, **NO_CODE)
    writer = gguf.GGUFWriter(file, twin.case.architecture)
    describe(writer, config, twin.case)
    add_words(writer, config.vocab_size, ends=False)
    found = [(each, tuple(values.shape)) for each, values in tensors(model, twin.case.architecture)]
    kinds = [_kind(twin, each, shape, config.num_hidden_layers) for each, shape in found]
    for (each, shape), kind in zip(found, kinds, strict=True):
        raw = gguf.GGMLQuantizationType[kind]
        elements, nbytes = gguf.GGML_QUANT_SIZES[raw]
        # the writer is given the shape of the bytes
        stored = (*shape[:-1], shape[-1] // elements * nbytes) if kind != "F32" else shape
        dtype = np.dtype(np.uint8 if kind != "F32" else np.float32)
        writer.add_tensor_info(each, stored, dtype, prod(shape) // elements * nbytes, raw)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        step()
    if sparse:
        stream = writer.fout[0]
        writer.write_padding(stream, stream.tell())
        stream.truncate(stream.tell() + sum(writer.ggml_pad(it.nbytes, ALIGNMENT) for it in writer.tensors[0].values()))
        writer.close()
        return
    with progress(f"writing {file.name}", len(found), "tensors") as bar:
        for number, ((each, shape), kind) in enumerate(zip(found, kinds, strict=True)):
            _write(writer, _values(each, shape, kind, number))
            bar.update()
    writer.close()


def _kind(twin: Twin, name: str, shape: tuple[int, ...], blocks: int) -> str:
    """The type of a tensor."""
    if len(shape) < 2 or "gate_inp" in name or name.endswith("bias"):
        return "F32"
    if not twin.mixed:
        return twin.kind if "exps" in name else "Q8_0"
    if name == "output.weight":
        return "Q6_K"
    if ("attn_v" in name or "ffn_down" in name) and _more_bits(int(name.split(".")[1]), blocks):
        return "Q6_K"
    return twin.kind


def _more_bits(block: int, blocks: int) -> bool:
    """llama.cpp's `use_more_bits`."""
    return block < blocks // 8 or block >= 7 * blocks // 8 or (block - blocks // 8) % 3 == 2


def _values(name: str, shape: tuple[int, ...], kind: str, seed: int) -> Iterator[np.ndarray]:
    """The bytes of a tensor, some rows at a time: norms of 1, biases of 0, other numbers random."""
    if len(shape) < 2 or name.endswith("bias"):
        yield np.full(shape, float(name.endswith("norm.weight")), np.float32)
        return
    rows, columns = prod(shape[:-1]), shape[-1]
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        yield random_blocks(
            kind, count, columns, seed=seed * 1000 + first // ROWS, deviation=columns**-0.5
        ).data.numpy()


def _write(writer: gguf.GGUFWriter, parts: Iterator[np.ndarray]) -> None:
    """Write a tensor and pad it, as the writer does with a whole one."""
    stream, nbytes = writer.fout[0], 0
    writer.write_padding(stream, stream.tell())
    for part in parts:
        part.tofile(stream)
        nbytes += part.nbytes
    writer.write_padding(stream, nbytes)
