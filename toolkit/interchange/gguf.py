"""A Llama or Mixtral decoder as a GGUF file, which llama.cpp runs.

    write_gguf(model, Path("twin.gguf"), "Q8_0")

The matrices of the layers take the named type; embeddings and head stay F16, norms F32, as llama.cpp's own converter
writes them. Names and the order of rows follow that converter (`convert_hf_to_gguf.py`, class `LlamaModel`). The
experts of a layer are one tensor of each kind, and its router stays F32.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.files import check_space, replacing
from toolkit.models.experts import Experts, block_experts
from toolkit.models.gguf_header import LAYERS, GgufTensor, read_header

# types of a matrix, from the most bytes to the fewest, and what GGUF calls a file of them
QUANTIZATIONS = {"F16": "F16", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_K": "Q4_K_S", "Q3_K": "Q3_K_S"}
ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
LINEARS = ATTENTION | {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


Quantise = Callable[[np.ndarray, str], np.ndarray]


def write_gguf(model: nn.Module, file: Path, quantization: str = "F16", quantise: Quantise | None = None) -> int:
    """Write a `LlamaForCausalLM` or a `MixtralForCausalLM`; `layer_bytes` are returned.

    `quantise(matrix, type)` gives the blocks of a matrix, uint8 [rows, bytes]. Without it the package `gguf` does that,
    which has no types with a K. The vocabulary is made up (`t7` is token 7): prompts must be given as numbers. Raises
    `UserError` for another kind of model, an unknown type or a disk that is too small.
    """
    import gguf

    if quantization not in QUANTIZATIONS:
        raise unknown("GGUF type", quantization, QUANTIZATIONS)
    if model.config.model_type not in ("llama", "mixtral"):
        raise UserError(f"a model of type {model.config.model_type!r}: expected 'llama' or 'mixtral'")
    kind = gguf.GGMLQuantizationType[quantization]
    if quantise is None and quantization.endswith("_K"):
        raise UserError(f"type {quantization}: the package gguf cannot quantise to it; choose Q4_0, or give `quantise`")
    linear_dtype = np.float16 if quantization == "F16" else np.float32
    check_space(file.parent, 2 * sum(parameter.numel() for parameter in model.parameters()))
    with replacing(file) as temporary:
        writer = gguf.GGUFWriter(temporary, "llama")
        _describe(writer, model.config, gguf.LlamaFileType[f"MOSTLY_{QUANTIZATIONS[quantization]}"])
        for name, tensor, linear in _tensors(model, linear_dtype):
            quantized = linear and quantization != "F16"
            values = tensor
            if quantized:
                values = quantise(tensor, quantization) if quantise else gguf.quants.quantize(tensor, kind)
            writer.add_tensor(name, values, raw_dtype=kind if quantized else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return layer_bytes(file)


def layer_bytes(file: Path) -> int:
    """The bytes of the layers' tensors in a file."""
    return sum(tensor.nbytes for tensor in _layers(file))


def layer_span(file: Path) -> tuple[int, int]:
    """Where in a file that `write_gguf` wrote the layers' tensors begin and end, in bytes: embeddings, layers, head."""
    layers = _layers(file)
    return min(tensor.offset for tensor in layers), max(tensor.offset + tensor.nbytes for tensor in layers)


def _layers(file: Path) -> list[GgufTensor]:
    """The tensors of a file's layers. Raises `UserError` for a piece of a split file, which has only some of them."""
    header = read_header(file)
    if len(header.files) > 1:
        raise UserError(f"{file}: one of {len(header.files)} pieces; join them with llama-gguf-split --merge first")
    return [tensor for name, tensor in header.tensors.items() if name.startswith(LAYERS)]


def _describe(writer, config, file_type: int) -> None:
    import gguf

    writer.add_file_type(file_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    special = ["<unk>", "<s>", "</s>"]
    writer.add_token_list(special + [f"t{number}" for number in range(len(special), config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_token_types(types + [gguf.TokenType.NORMAL] * (config.vocab_size - len(special)))
    writer.add_add_bos_token(False)


def _tensors(model: nn.Module, linear_dtype: type) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Name in GGUF, values, and whether it is a matrix of a layer."""
    decoder, config = model.model, model.config
    yield "token_embd.weight", _array(decoder.embed_tokens.weight, np.float16), False
    for number, layer in enumerate(decoder.layers):
        for name, short in NORMS.items():
            yield f"blk.{number}.{short}.weight", _array(layer.get_submodule(name).weight, np.float32), False
        dense = config.model_type == "llama"
        for name, short in (LINEARS if dense else ATTENTION).items():
            weight = layer.get_submodule(name).weight
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short)
            yield f"blk.{number}.{short}.weight", _array(_interleaved(weight, heads), linear_dtype), True
        if not dense:
            yield from _experts(number, block_experts(layer, number), linear_dtype)
    yield "output_norm.weight", _array(decoder.norm.weight, np.float32), False
    yield "output.weight", _array(model.lm_head.weight, np.float16), False


def _experts(number: int, experts: Experts, linear_dtype: type) -> Iterator[tuple[str, np.ndarray, bool]]:
    yield f"blk.{number}.ffn_gate_inp.weight", _array(experts.gate.weight, np.float32), False
    matrices = zip(*map(experts.matrices, range(experts.count)), strict=True)
    for short, each in zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), matrices, strict=True):
        rows = each if short != "ffn_down_exps" else [weight.T for weight in each]
        yield f"blk.{number}.{short}.weight", _array(torch.stack(list(rows)), linear_dtype), True


def _interleaved(weight: Tensor, heads: int | None) -> Tensor:
    """Rows of a query or key matrix in llama.cpp's order: a rotated pair side by side, not half a head apart."""
    if heads is None:
        return weight
    return weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _array(tensor: Tensor, dtype: type) -> np.ndarray:
    return tensor.to(torch.float32).numpy().astype(dtype)
