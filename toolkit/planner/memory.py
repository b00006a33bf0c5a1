"""The memory that a process takes beside the weights and buffers of a way, for plans within a limit of the process.

beside = Beside.of(open_target("qwen2.5-coder-1.5b"), prompt_tokens=64)
beside.bytes_of(way)      # what `run --memory` takes off the limit first
"""

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pandas as pd

from toolkit import sources
from toolkit.cache import cached_table
from toolkit.errors import UserError
from toolkit.measure import llama_cpp
from toolkit.measure.turns import circumstances
from toolkit.models.architectures import ModelShape
from toolkit.models.gguf_header import LARGE, read_header
from toolkit.offload.decoder.architecture import architecture_of
from toolkit.offload.decoder.decoder import overhead
from toolkit.offload.overhead import FLOAT, Overhead, TextRoom, cache_bytes
from toolkit.offload.variant import no_kv_type
from toolkit.planner.sizes import ELEMENT_BYTES
from toolkit.planner.target import Target
from toolkit.planner.ways import NEURONS, RIVAL, STREAMED, PlannedWay

MEASURES = "toolkit.commands.memory"  # the program that prints what a process holds
NEW_TOKENS = 40  # as many as `run` generates unless told otherwise


@dataclass(frozen=True)
class Beside:
    """Bytes beside weights and buffers: of `run` for layers and experts, for neurons, and of llama.cpp.

    `file` are those of a GGUF file that is run as it is without torch; None for other models.
    """

    layers: int
    neurons: int
    rival: int
    file: int | None = None

    @classmethod
    def of(cls, target: Target, prompt_tokens: int, kv_type: str | None = None) -> Self:
        """For a model, and one text: `prompt_tokens`, and as many new ones as `run` generates by default.

        `kv_type` is that of keys and values of a file that is run without torch.
        """
        small = target.file is not None and sum(target.shape.parameters.values()) < LARGE
        config, present = configuration(target.shape, FLOAT if small else ELEMENT_BYTES), present_bytes(target.file)
        layers, neurons = (
            present + Overhead.of(config, TextRoom(prompt_tokens, NEW_TOKENS), by_neuron=by_neuron).nbytes
            for by_neuron in (False, True)
        )
        rival = llama_cpp.OWN_BYTES + cache_bytes(config, prompt_tokens + NEW_TOKENS)
        return cls(layers, neurons, rival, _of_file(target.file, prompt_tokens, kv_type))

    def bytes_of(self, way: PlannedWay) -> int:
        """The bytes of a way."""
        if way.file is not None and way.kind == STREAMED and self.file is not None:
            return self.file
        return {RIVAL: self.rival, NEURONS: self.neurons}.get(way.kind, self.layers)

    @property
    def least(self) -> int:
        """The bytes of the toolkit's smallest process."""
        return self.layers if self.file is None else min(self.layers, self.file)


def _of_file(file: Path | None, prompt_tokens: int, kv_type: str | None) -> int | None:
    """The bytes of a GGUF file that is run without torch, if it is."""
    sizes = architecture_of(read_header(file)) if file else None
    if sizes is None:
        return None
    beside = overhead(sizes.with_cache(kv_type), TextRoom(prompt_tokens, NEW_TOKENS), False)
    return present_bytes(file, "without-torch") + beside.nbytes


def check_kv_type(file: Path | None, name: str, kv_type: str | None) -> None:
    """Raise `UserError` for a type of keys and values that this model's cache cannot have."""
    if kv_type is None:
        return
    sizes = architecture_of(read_header(file)) if file else None
    if sizes is None:
        raise no_kv_type(name, kv_type)
    sizes.with_cache(kv_type)


def configuration(shape: ModelShape, element_bytes: int) -> SimpleNamespace:
    """The fields of a configuration of transformers that `Overhead` reads; `element_bytes` are those of an activation.

    Keys and values of a model at hand are taken to be its narrowest attention matrix.
    """
    narrowest = min((rows for rows, _ in shape.own_attention or ()), default=shape.key_value_heads * shape.head_size)
    config = SimpleNamespace(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=max(1, narrowest // shape.head_size),
        head_dim=shape.head_size,
        intermediate_size=shape.dense_ffn or shape.ffn,
        moe_intermediate_size=shape.ffn,
        num_experts_per_tok=shape.experts_per_token,
        vocab_size=shape.vocabulary,
        dtype=SimpleNamespace(itemsize=element_bytes),
    )
    config.get_text_config = lambda: config
    return config


def present_bytes(file: Path | None, *way: str) -> int:
    """The bytes that a process holds once it has imported what `run` needs, and has read the tokenizer of a GGUF file.

    Measured once, in a process of its own. The `way` is that of `toolkit.commands.memory`.
    """
    state = file and file.stat()
    about = {"file": state and [file.name, state.st_size, state.st_mtime_ns], "way": [*way]}
    code = sources.dependencies(MEASURES)
    table = cached_table("measured", circumstances() | about, code, partial(_present, file, *way))
    return int(table["nbytes"].item())


def _present(file: Path | None, *way: str) -> pd.DataFrame:
    command = [sys.executable, "-P", "-m", MEASURES, *([str(file), *way] if file else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the memory of a process cannot be measured: {(done.stderr.splitlines() or [''])[-1]}")
    return pd.DataFrame({"nbytes": [int(done.stdout)]})
