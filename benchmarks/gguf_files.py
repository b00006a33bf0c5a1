"""Small random models of transformers and the GGUF files that llama.cpp's converter would make of them.

    case = CASES["llama, yarn"]
    model = case.model()
    write(model, case, Path("model.gguf"))

Names come from the package `gguf` (`get_tensor_name_map`), keys from the methods of its writer, and values from
`convert_hf_to_gguf.py` as it stands: nothing here knows the toolkit's tables. Both the tests and `gguf_logits.py` use
it. Windows and original lengths are a few tokens, so that short texts reach beyond them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor, nn

from toolkit.hub import NO_CODE

HIDDEN, FFN, HEADS, KV_HEADS, WORDS, LENGTH = 64, 96, 4, 2, 128, 256
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
LOCAL = {"num_experts_per_tok": 2, "num_local_experts": 4}
SHARED = {"shared_expert_intermediate_size": 64, "norm_topk_prob": False}
THETA = 10_000.0
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
LONG = {"original_max_position_embeddings": 2048}
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PAIRED = ("llama", "granite", "granitemoe", "olmo", "smollm3", "arcee")  # `LlamaModel.permute`
SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron")  # 1 is added to the weights of norms


def longrope(original: int, longest: int, pairs: int = 8) -> dict[str, Any]:
    """Phi-3's fields for two lists of factors, and the length beyond which the second one holds."""
    scale = longest / original
    rope = {
        "rope_type": "longrope",
        "rope_theta": THETA,
        "short_factor": [1 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + pair for pair in range(pairs)],
        "original_max_position_embeddings": original,
        "attention_factor": math.sqrt(1 + math.log(scale) / math.log(original)),
    }
    lengths = {"original_max_position_embeddings": original, "max_position_embeddings": longest}
    return lengths | {"rope_parameters": rope}


@dataclass(frozen=True)
class Case:
    """A model type of transformers with some fields of its configuration, and its architecture in GGUF."""

    architecture: str
    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    ignored: str = ""
    """A part of the model that llama.cpp leaves out by design."""

    def all_fields(self) -> dict[str, Any]:
        """The fields of the configuration, those of all cases among them."""
        return SIZES | dict(self.fields)

    def model(self) -> nn.Module:
        """The model with random weights, fp32, the same ones each time."""
        config = transformers.AutoConfig.for_model(self.model_type, **self.all_fields())
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **NO_CODE).eval()
        numbers = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                spread = 0.5 if "embed" in name else 0.3 if tensor.ndim < 2 else tensor.shape[-1] ** -0.5
                centre = float("norm" in name and name.endswith("weight") and self.architecture not in SHIFTED)
                tensor.copy_(centre + spread * torch.randn(tensor.shape, generator=numbers))
        return model


Quantise = Callable[[str, np.ndarray], np.ndarray]


def write(
    model: nn.Module,
    case: Case,
    file: Path,
    kind: str = "F32",
    pieces: int = 0,
    quantise: Quantise | None = None,
    **more: Any,
) -> None:
    """Write a model as llama.cpp's converter would. Matrices take the type `kind`.

    Args:
        pieces: how many tensors a piece of a split file has; 0 writes one file.
        quantise: makes the blocks of a matrix of that type, bytes [..., bytes of a row]; None takes the package gguf's.
        more: further keys of the architecture, or other values for them.
    """
    writer = gguf.GGUFWriter(file, case.architecture, split_max_tensors=pieces)
    describe(writer, model.config, case)
    add_words(writer)
    for key, value in more.items():
        add = writer.add_string if isinstance(value, str) else writer.add_bool if isinstance(value, bool) else None
        add = add or (writer.add_uint32 if isinstance(value, int) else writer.add_float32)
        writer.kv_data[0].pop(name := f"{case.architecture}.{key.replace('__', '.')}", None)
        add(name, value)
    for name, values in tensors(model, case.architecture):
        array, matrix = values.detach().float().contiguous().numpy(), values.ndim > 1 and "gate_inp" not in name
        raw = gguf.GGMLQuantizationType[kind] if matrix else gguf.GGMLQuantizationType.F32
        blocks = quantise(kind, array) if quantise and matrix else gguf.quants.quantize(array, raw)
        writer.add_tensor(name, blocks, raw_dtype=raw)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def describe(writer, config, case: Case) -> None:
    """The keys that the converter writes, each class of it (`set_gguf_parameters`)."""
    get = lambda name, other=None: getattr(config, name, other)  # noqa: E731
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = get("head_dim") or hidden // heads
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if case.architecture not in ("starcoder2", "stablelm", "olmo", "command-r"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    if get("rms_norm_eps") is not None:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(get("layer_norm_eps") or get("norm_epsilon") or get("norm_eps") or 1e-5)
    whole = rope.get("full_attention", rope)
    writer.add_rope_freq_base(whole["rope_theta"])
    if case.architecture not in ("gemma2", "gemma3", "qwen2", "qwen3"):
        writer.add_rope_dimension_count(int(head_dim * whole.get("partial_rotary_factor", 1)))
    _describe_rope(writer, whole, case)
    count = get("num_local_experts") or get("num_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        own = config.intermediate_size if case.architecture in ("gpt-oss", "minimax-m2") else None
        if width := get("moe_intermediate_size") or own:
            writer.add_expert_feed_forward_length(width)
        if width := get("shared_expert_intermediate_size") or get("shared_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(width)
    OTHERS.get(case.architecture, lambda writer, config: None)(writer, config)


def _describe_rope(writer, rope: Mapping[str, Any], case: Case) -> None:
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    if case.architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(original or LENGTH)
        if kind == "longrope":
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    elif kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(original)
        for name in ("beta_fast", "beta_slow"):
            if name in rope and case.architecture != "gpt-oss":
                getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[name])


def _describe_window(writer, config) -> None:
    writer.add_sliding_window(config.sliding_window or 0)


def _describe_gemma_2(writer, config) -> None:
    _describe_window(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _describe_granite(writer, config) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _describe_cohere(writer, config) -> None:
    writer.add_logit_scale(config.logit_scale)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _describe_olmo(writer, config) -> None:
    if config.clip_qkv:
        writer.add_clamp_kqv(config.clip_qkv)


OTHERS: Mapping[str, Callable] = {
    "llama": lambda writer, config: getattr(config, "sliding_window", None) and _describe_window(writer, config),
    "gemma2": _describe_gemma_2,
    "gemma3": _describe_window,
    "phi3": _describe_window,
    "gpt-oss": _describe_window,
    "granite": _describe_granite,
    "granitemoe": _describe_granite,
    "command-r": _describe_cohere,
    "cohere2": _describe_cohere,
    "olmo": _describe_olmo,
    "olmoe": _describe_olmo,
    "minimax-m2": lambda writer, config: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
    "stablelm": lambda writer, config: writer.add_parallel_residual(config.use_parallel_residual),
    "exaone4": lambda writer, config: config.sliding_window and _describe_window(writer, config),
}


def add_words(writer, count: int = WORDS, ends: bool = True) -> None:
    """A byte-level vocabulary: special tokens, letters, a merge, and words that no text has.

    Unless `ends`, no token ends a text.
    """
    words = ["<unk>", "<s>", "</s>", *map(chr, range(97, 123)), "Ġ", "he", "Ġt"]
    words += [f"w{number}" for number in range(len(words), count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (count - 3))
    writer.add_token_merges(["h e", "Ġ t"])
    writer.add_bos_token_id(1)
    if ends:
        writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def tensors(model: nn.Module, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Names and values as the converter writes them."""
    config = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama_3_factors(rope, config.hidden_size // config.num_attention_heads)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    stored = model.state_dict()
    if config.tie_word_embeddings:
        del stored["lm_head.weight"]
    for full, values in stored.items():
        for name, part in _unfused(full, values, architecture):
            found = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ValueError(f"llama.cpp has no name for {name} of {architecture}")
            yield found, _converted(found, part, config, architecture)


def _unfused(name: str, values: Tensor, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters that transformers 5 fuses, as the converter gets or writes them: apart."""
    number = name.split(".")[2] if name.startswith("model.layers.") else ""
    oss, kind = architecture == "gpt-oss", "bias" if name.endswith("_bias") else "weight"
    if ".experts.gate_up_proj" in name:
        joined = values.transpose(1, 2) if oss and kind == "weight" else values
        gate, up = (joined[:, 0::2], joined[:, 1::2]) if oss else joined.chunk(2, 1)
        yield f"blk.{number}.ffn_gate_exps.{kind}", gate
        yield f"blk.{number}.ffn_up_exps.{kind}", up
    elif ".experts.down_proj" in name:
        yield f"blk.{number}.ffn_down_exps.{kind}", values.transpose(1, 2) if oss and kind == "weight" else values
    elif "shared_mlp.input_linear" in name:
        yield from zip(
            (f"blk.{number}.ffn_{half}_shexp.weight" for half in ("gate", "up")), values.chunk(2), strict=True
        )
    elif "router.weight" in name and architecture == "granitemoe":
        yield f"blk.{number}.ffn_gate_inp.weight", values
    elif "e_score_correction_bias" in name:
        yield f"blk.{number}.exp_probs_b.bias", values
    elif name.endswith("sinks"):
        yield f"blk.{number}.attn_sinks.weight", values
    else:
        yield name, values


def _converted(name: str, values: Tensor, config, architecture: str) -> Tensor:
    short = name.split(".")[-2]
    if architecture in PAIRED and short in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if short == "attn_q" else config.num_key_value_heads
        return (
            values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            .swapaxes(1, 2)
            .reshape(values.shape)
        )
    if architecture in SHIFTED and short.endswith("norm") and name.endswith("weight"):
        return values + 1
    return values


def _llama_3_factors(rope: Mapping[str, Any], dimensions: int) -> Tensor:
    """`LlamaModel.generate_extra_tensors`."""
    factors, original = [], rope["original_max_position_embeddings"]
    for pair in range(dimensions // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / dimensions)
        if wavelength < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


GEMMA = {"head_dim": 32, "tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 32}
GEMMA_3 = GEMMA | {
    "num_hidden_layers": 6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
    },
}
EIGHTFOLD = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
SCALES = {
    "attention_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
    "rms_norm_eps": 1e-5,
}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}}
TIED = {"tie_word_embeddings": True}
CASES: Mapping[str, Case] = {
    "llama": Case("llama", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama, tied": Case("llama", "llama", TIED | {"head_dim": 32, "rms_norm_eps": 1e-3}),
    "llama, biases": Case("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": Case("llama", "llama", {"rope_parameters": LINEAR}),
    "llama, yarn": Case("llama", "llama", {"rope_parameters": YARN}),
    "llama, llama 3": Case("llama", "llama", {"rope_parameters": LLAMA_3}),
    "mistral, window": Case("llama", "mistral", {"sliding_window": 8}, ignored="the window"),
    "mixtral": Case("llama", "mixtral", LOCAL),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen2, yarn": Case("qwen2", "qwen2", {"rope_parameters": YARN | LONG}),
    "qwen2, yarn, fast": Case("qwen2", "qwen2", {"rope_parameters": YARN | LONG | {"beta_fast": 8.0}}, "beta_fast"),
    "qwen2, yarn, slow": Case("qwen2", "qwen2", {"rope_parameters": YARN | LONG | {"beta_slow": 2.0}}, "beta_slow"),
    "qwen3": Case("qwen3", "qwen3", {"head_dim": 32}),
    "qwen2moe": Case("qwen2moe", "qwen2_moe", MOE | SHARED),
    "qwen3moe": Case("qwen3moe", "qwen3_moe", MOE | {"head_dim": 32}),
    "qwen3moe, linear": Case("qwen3moe", "qwen3_moe", MOE | {"head_dim": 32, "rope_parameters": LINEAR}),
    "phi3": Case("phi3", "phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}),
    "phi3, window": Case("phi3", "phi3", {"sliding_window": 8}, ignored="the window"),
    "phi3, short": Case("phi3", "phi3", longrope(1024, 2048)),
    "phi3, long": Case("phi3", "phi3", longrope(16, LENGTH)),
    "gemma": Case("gemma", "gemma", {"head_dim": 32} | TIED),
    "gemma2": Case("gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2, 46 blocks": Case("gemma2", "gemma2", GEMMA | {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}),
    "gemma3": Case("gemma3", "gemma3_text", GEMMA_3),
    "gemma3, global × 8": Case(
        "gemma3",
        "gemma3_text",
        GEMMA_3 | {"rope_parameters": GEMMA_3["rope_parameters"] | {"full_attention": EIGHTFOLD}},
    ),
    "gemma3, 62 blocks": Case(
        "gemma3", "gemma3_text", GEMMA_3 | {"num_hidden_layers": 62, "query_pre_attn_scalar": 16}
    ),
    "gpt-oss": Case(
        "gpt-oss",
        "gpt_oss",
        LOCAL | {"head_dim": 32, "sliding_window": 8, "rope_parameters": YARN | {"truncate": False}},
        ignored="untruncated corrections",
    ),
    "minimax-m2": Case("minimax-m2", "minimax_m2", LOCAL | {"head_dim": 32} | PARTIAL),
    "granite": Case("granite", "granite", SCALES),
    "granitemoe": Case("granitemoe", "granitemoe", LOCAL | SCALES),
    "granitemoe, shared": Case("granitemoe", "granitemoeshared", LOCAL | SCALES | {"shared_intermediate_size": 64}),
    "olmo": Case("olmo", "olmo", {"clip_qkv": 0.5}),
    "olmo2": Case("olmo2", "olmo2"),
    "olmoe": Case("olmoe", "olmoe", {"num_experts_per_tok": 2, "num_experts": 4, "num_key_value_heads": HEADS}),
    "smollm3": Case("smollm3", "smollm3", {"num_hidden_layers": 4} | TIED),
    "arcee": Case("arcee", "arcee"),
    "command-r": Case("command-r", "cohere", TIED | {"logit_scale": 0.5}),
    "cohere2": Case("cohere2", "cohere2", TIED | {"logit_scale": 0.5, "sliding_window": 8, "num_hidden_layers": 4}),
    "starcoder2": Case("starcoder2", "starcoder2"),
    "stablelm": Case("stablelm", "stablelm", {"use_qkv_bias": True, "use_parallel_residual": False} | PARTIAL),
    "nemotron": Case("nemotron", "nemotron", {"head_dim": 16} | PARTIAL),
    "seed_oss": Case("seed_oss", "seed_oss", {"head_dim": 32}),
    "glm4": Case("glm4", "glm4", {"head_dim": 32} | PARTIAL),
    "ernie4_5": Case("ernie4_5", "ernie4_5", {"head_dim": 32} | TIED),
    "exaone4": Case("exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "hunyuan-dense": Case("hunyuan-dense", "hunyuan_v1_dense", {"head_dim": 32} | TIED),
}
