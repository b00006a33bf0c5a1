"""Folders in Hugging Face's layout with the shapes of large models: for memory, time and headers alone.

    write_folder("llama2-7b", Path("llama2-7b"))                 # random weights, 13 GB
    write_folder("llama2-70b", Path("llama2-70b"), sparse=True)  # holes in place of weights, which take no disk
    python benchmarks/folder_twins.py llama2-7b FOLDER

A shard is written at a time, a tensor at a time, so a large folder takes little memory. Each byte of a text is a token.
"""

import json
import struct
import sys
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from toolkit.hub import NO_CODE
from toolkit.models.architectures import ARCHITECTURES
from toolkit.progress import progress

SHARD_BYTES, BYTES = 5 * 10**9, 2  # of a weight in bfloat16
DRAWN = 1 << 24  # weights that are drawn; the others repeat them from another place on
POSITIONS = 4096


def write_folder(name: str, folder: Path, sparse: bool = False) -> None:
    """Write a Llama of the sizes of `ARCHITECTURES` in bfloat16; `sparse` leaves holes in place of its weights."""
    model = _outline(name)
    model.config.architectures = [type(model).__name__]
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    shards = [*_shards({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})]
    files = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    places = {name: file for shard, file in zip(shards, files, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    drawn = np.random.default_rng(0).normal(0, 1, DRAWN).astype(np.float32)
    with progress(f"writing {folder.name}", len(shards), "shards") as bar:
        for shard, file in zip(shards, files, strict=True):
            _write(folder / file, shard, None if sparse else drawn)
            bar.update()


def _outline(name: str) -> transformers.PreTrainedModel:
    shape = ARCHITECTURES[name]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=POSITIONS,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, **NO_CODE)


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if shard and BYTES * sum(map(prod, (*shard.values(), shape))) > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def _write(file: Path, shard: dict[str, tuple[int, ...]], drawn: np.ndarray | None) -> None:
    header, end = {}, 0
    for name, shape in shard.items():
        begin, end = end, end + BYTES * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shard.items() if drawn is not None else ():
            _values(name, shape, drawn).tofile(stream)
        stream.truncate(8 + len(text) + end)


def _values(name: str, shape: tuple[int, ...], drawn: np.ndarray) -> np.ndarray:
    """Norms of 1; a matrix keeps the size of its inputs. The upper halves of float32 are bfloat16."""
    values = np.ones(shape, np.float32)
    if len(shape) > 1:
        values = np.resize(np.roll(drawn, zlib.crc32(name.encode())), prod(shape)) * np.float32(shape[-1] ** -0.5)
    return values.ravel().view(np.uint16)[1::2]


if __name__ == "__main__":
    write_folder(sys.argv[1], Path(sys.argv[2]))
