"""The tensors of a GGUF file and the parameters of transformers' model that they fill.

    for placement in placements(header, sizes):
        placement.tensor            # where it lies in which file, its type
        placement.parameter         # the parameter's name
        placement.layout            # how the file's values lie in the parameter
    fill(parameters, placement)     # dequantise it into its parameter

Names are those of llama.cpp (`gguf.constants.MODEL_TENSORS`), layouts those of its converter (`convert_hf_to_gguf.py`).
A tensor is described apart from reading it, so that its blocks can also be used as they lie.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.models.gguf_header import LAYERS, LONG, ROTARY, SHORT, GgufHeader, GgufTensor

PIECE = 1 << 22  # values that a thread dequantises at a time


@dataclass(frozen=True)
class TensorLayout:
    """How the values of a file's tensor become values of a parameter: `parameter[part] = values + shift`."""

    heads: int = 0
    """Number of heads if each one's rows are rotated pairs side by side; a pair's rows lie half a head apart here."""
    shift: float = 0.0
    """Added to each value: llama.cpp stores the norms of some models with 1 added."""
    part: tuple[slice, ...] = ()
    """The part of the parameter that the tensor fills."""
    transposed: bool = False
    """Whether the last two dimensions are swapped."""

    def view(self, parameter: Tensor) -> Tensor:
        """The part of a parameter that a tensor of this layout fills, in the order of the file's values.

        Its shape is the file's, but that heads and pairs are dimensions of their own.
        """
        view = parameter[self.part] if self.part else parameter
        if self.transposed:
            view = view.transpose(-1, -2)
        if self.heads:
            view = view.unflatten(0, (self.heads, 2, -1)).transpose(1, 2)
        return view


@dataclass(frozen=True)
class Placement:
    """A tensor of a file, by its name in the file, and where its values go."""

    name: str
    tensor: GgufTensor
    parameter: str
    layout: TensorLayout


@dataclass(frozen=True)
class Names:
    """The names in transformers of an architecture's tensors, and their layouts."""

    block: Mapping[str, str]
    """Parameters of a block by the tensor's name without its number and `.weight` or `.bias`."""
    ends: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
        }
    )
    paired: bool = False
    """Whether the rows of queries and keys are rotated pairs side by side."""
    shift: float = 0.0
    """The number that is added to the weights of norms."""
    interleaved: bool = False
    """Whether an expert's gate and up projection are columns in turns, and the experts' matrices are transposed."""


ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
DECODER = ATTENTION | {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = DECODER | {  # norms before and after
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = DECODER | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
SHARED = EXPERTS | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GPT_OSS = EXPERTS | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
GRANITE_MOE = EXPERTS | {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_up_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
GLM_4 = DECODER | {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
ARCHITECTURES = {
    "llama": Names(EXPERTS, paired=True),
    "qwen2": Names(DECODER),
    "qwen3": Names(DECODER),
    "qwen2moe": Names(SHARED),
    "qwen3moe": Names(EXPERTS),
    "phi3": Names(DECODER | FUSED),
    "gemma": Names(DECODER, shift=-1),
    "gemma2": Names(SANDWICH, shift=-1),
    "gemma3": Names(SANDWICH, shift=-1),
    "gpt-oss": Names(GPT_OSS, interleaved=True),
    "minimax-m2": Names(EXPERTS | {"exp_probs_b": "mlp.e_score_correction_bias"}),
    "granite": Names(DECODER, paired=True),
    "granitemoe": Names(GRANITE_MOE, paired=True),
    "olmo": Names(DECODER, paired=True),
    "olmo2": Names(SANDWICH),
    "olmoe": Names(EXPERTS),
    "smollm3": Names(DECODER, paired=True),
    "arcee": Names(DECODER, paired=True),
    "command-r": Names(DECODER),
    "cohere2": Names(DECODER),
    "starcoder2": Names(DECODER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "stablelm": Names(DECODER),
    "nemotron": Names(DECODER, shift=-1),
    "seed_oss": Names(DECODER | {"post_attention_norm": "post_attention_layernorm"}),
    "glm4": Names(GLM_4),
    "ernie4_5": Names(DECODER),
    "exaone4": Names(SANDWICH),
    "hunyuan-dense": Names(
        DECODER | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    ),
}
WHOLE = ("exps", "sinks", "exp_probs_b")  # whose parameters have no `.weight` or `.bias` of their own
FIRST, SECOND = ("ffn_gate_exps", "ffn_gate_shexp"), ("ffn_up_exps", "ffn_up_shexp")  # halves of fused parameters


def placements(header: GgufHeader, sizes: Mapping[str, tuple[int, ...]], heads: tuple[int, int]) -> list[Placement]:
    """Where each tensor of a file goes, each used once.

    Args:
        header: of an architecture of `ARCHITECTURES`.
        sizes: the shapes of the model's parameters by their names; tied ones once.
        heads: how many heads queries and keys have.

    Raises `UserError`, which names the tensor, for one that the model has no place for, that the file lacks, that has
    another shape than the parameter, or whose type the package `gguf` does not dequantise.
    """
    found = []
    for name, tensor in header.tensors.items():
        if name in (ROTARY, SHORT, LONG):  # `gguf_config` puts them into the configuration
            continue
        placement = _placement(name, tensor, ARCHITECTURES[str(header.architecture)], sizes, heads)
        if placement.parameter not in sizes:
            raise UserError(f"the model that its header describes has no place for its tensor {name!r:.99}")
        _check_type(name, tensor)
        found.append(placement)
    _check_filled(found, sizes)
    return found


def _placement(name: str, tensor: GgufTensor, names: Names, sizes: Mapping, heads: tuple[int, int]) -> Placement:
    stem, _, kind = name.rpartition(".")
    prefix, table = "", names.ends
    if stem.startswith(LAYERS):
        number, _, stem = stem.removeprefix(LAYERS).partition(".")
        prefix, table = f"model.layers.{number}.", names.block
    if stem not in table:
        return Placement(name, tensor, "", TensorLayout())
    parameter = prefix + table[stem]
    if stem.endswith(WHOLE):
        parameter += "_bias" if kind == "bias" and stem.endswith("exps") else ""
    else:
        parameter += f".{kind}"
    layout = TensorLayout(transposed=names.interleaved and stem.endswith("exps") and kind == "weight")
    if stem.endswith("norm") and kind == "weight":
        layout = replace(layout, shift=names.shift)
    if names.paired and stem in ("attn_q", "attn_k"):
        layout = replace(layout, heads=heads[stem == "attn_k"])
    if stem in FIRST + SECOND and parameter in sizes and _fused(parameter):
        layout = replace(layout, part=_half(stem in SECOND, sizes[parameter], names.interleaved))
    return Placement(name, tensor, parameter, layout)


def _fused(parameter: str) -> bool:
    return "gate_up" in parameter or "input_linear" in parameter


def _half(second: bool, shape: tuple[int, ...], interleaved: bool) -> tuple[slice, ...]:
    """The gate's or the up projection's part of a parameter that holds both."""
    if interleaved:  # [experts, columns, rows] in turns
        return (slice(None),) * (len(shape) - 1) + (slice(int(second), None, 2),)
    rows = len(shape) - 2
    half = shape[rows] // 2
    return (slice(None),) * rows + (slice(half, None) if second else slice(0, half),)


def _check_type(name: str, tensor: GgufTensor) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[tensor.kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)  # one block
    except NotImplementedError as error:
        raise UserError(
            f"its tensor {name!r:.99} has type {tensor.kind}, which the package gguf cannot dequantise"
        ) from error


def _check_filled(found: list[Placement], sizes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `UserError` unless the tensors fill every parameter exactly once."""
    filled: dict[str, list[Placement]] = {}
    for placement in found:
        filled.setdefault(placement.parameter, []).append(placement)
    if missing := [name for name in sizes if name not in filled]:
        raise UserError(f"it lacks {len(missing)} of the model's tensors, such as {missing[0]}")
    for parameter, parts in filled.items():
        outline = torch.empty(sizes[parameter], device="meta")
        for part in parts:
            _check_shape(part, outline)
        if len({str(part.layout.part) for part in parts}) < len(parts):
            raise UserError(f"its tensors {parts[0].name!r:.99} and {parts[1].name!r:.99} are the same parameter")
        if sum(prod(part.tensor.shape) for part in parts) != prod(sizes[parameter]):
            raise UserError(f"it lacks a part of the model's tensor {parameter}: it has only {parts[0].name!r:.99}")


def _check_shape(part: Placement, outline: Tensor) -> None:
    shape, rows = part.tensor.shape, part.layout.heads
    expected = tuple(part.layout.view(outline).shape)
    flat = (prod(expected[:3]), *expected[3:]) if rows else expected
    if [size for size in shape if size != 1] != [size for size in flat if size != 1]:
        raise UserError(
            f"its tensor {part.name!r:.99} is {' × '.join(map(str, shape))}, and its header describes a model that "
            f"has {' × '.join(map(str, flat))} there"
        )


def fill(parameter: Tensor, placement: Placement) -> None:
    """Dequantise a tensor to float32 and round it once to the type of the parameter that it fills."""
    layout = placement.layout
    values = dequantised(placement.tensor, torch.float32 if layout.shift else parameter.dtype)
    view = layout.view(parameter)
    view.copy_((values + layout.shift if layout.shift else values).reshape(view.shape))


def dequantised(tensor: GgufTensor, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> Tensor:
    """The values of a tensor, in its own shape, or some rows of a matrix; on all cores, float32 in between."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    columns = tensor.shape[-1] if tensor.shape else 1
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes,))
    blocks = raw.reshape(prod(tensor.shape) // columns, -1)[rows or slice(None)]
    kind = GGMLQuantizationType[tensor.kind]
    with torch.inference_mode(False):  # the caller may be in it, and the threads of the pool are not
        values = torch.empty(len(blocks), columns, dtype=dtype)

    def convert(span: slice) -> None:
        piece = np.array(blocks[span])  # aligned, and apart from the file
        values[span].copy_(torch.from_numpy(dequantize(piece, kind)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(convert, _spans(len(blocks), max(1, PIECE // columns))))
    return values if rows else values.reshape(tensor.shape)


def _spans(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
