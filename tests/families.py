"""Small random decoders of many families, as `load_model` reads them from a folder."""

import json
from pathlib import Path

import torch
import transformers
from torch import nn

from toolkit import hub
from toolkit.models import load_model

WORDS = 97
WIDTH = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LONG = WIDTH | {"max_position_embeddings": 640, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = LONG | {"intermediate_size": 96, "num_key_value_heads": 2}
HEADS = LLAMA | {"head_dim": 16}
GPT = {"vocab_size": WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 640, "n_inner": 96}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ENCODER = WIDTH | {"max_position_embeddings": 640, "intermediate_size": 96, "pad_token_id": 0}

FAMILIES: dict[str, tuple[str, dict]] = {
    "Llama, tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "Llama, with biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "Mistral, windowed": ("Mistral", LLAMA | {"sliding_window": 7}),
    "Qwen2": ("Qwen2", LLAMA),
    "Qwen3": ("Qwen3", HEADS),
    "Gemma": ("Gemma", HEADS),
    "Gemma2": ("Gemma2", HEADS | {"sliding_window": 7}),
    "Gemma3": ("Gemma3Text", HEADS | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
    "OLMo": ("Olmo", LLAMA),
    "OLMo2": ("Olmo2", LLAMA),
    "StableLM": ("StableLm", LLAMA | {"use_qkv_bias": True}),
    "Granite": ("Granite", LLAMA | {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "Persimmon": ("Persimmon", LONG | {"intermediate_size": 96}),
    "SmolLM3": ("SmolLM3", LLAMA),
    "Phi": ("Phi", LLAMA),
    "Phi-3": ("Phi3", LLAMA),
    "OPT": ("OPT", LONG | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "OPT, as 350m": (
        "OPT",
        LONG | {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "tie_word_embeddings": True},
    ),
    "GPT-NeoX": ("GPTNeoX", LONG | {"intermediate_size": 96}),
    "Falcon, as 7b": ("Falcon", WIDTH | {"multi_query": True, "parallel_attn": True, "bias": False}),
    "Falcon, as 40b": ("Falcon", WIDTH | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}),
    "Falcon, with biases": ("Falcon", WIDTH | {"bias": True, "alibi": False}),
    "GPT-J": ("GPTJ", GPT | {"rotary_dim": 8}),
    "CodeGen": ("CodeGen", GPT | {"rotary_dim": 8}),
    "BitNet": ("BitNet", LLAMA | {"hidden_act": "relu2"}),
    "MPT": ("Mpt", {"vocab_size": WORDS, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 640}),
    "Nemotron": ("Nemotron", LLAMA),
    "Bloom": ("Bloom", {"vocab_size": WORDS, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "Starcoder2": ("Starcoder2", LLAMA),
    "GLM4": ("Glm4", HEADS),
    "GPT-2": ("GPT2", GPT),
    "Cohere": ("Cohere", LLAMA | {"use_qk_norm": True}),
    "DeepSeek-V3, dense": ("DeepseekV3", LLAMA | {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS,
    }),
    "Mixtral": ("Mixtral", LLAMA | LOCAL),
    "Qwen2-MoE": ("Qwen2Moe", LLAMA | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 48}),
    "Qwen3-MoE": ("Qwen3Moe", HEADS | EXPERTS | {"num_experts": 4}),
    "OLMoE": ("Olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "GptOss": ("GptOss", HEADS | LOCAL | {"layer_types": ["sliding_attention", "full_attention"]}),
    "JetMoE": ("JetMoe", LLAMA | LOCAL | {"kv_channels": 16, "num_key_value_heads": 2}),
    "GraniteMoE": ("GraniteMoe", LLAMA | LOCAL),
    "PhiMoE": ("Phimoe", LLAMA | LOCAL),
    "GLM4-MoE": ("Glm4Moe", LLAMA | EXPERTS | {
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }),
    "DeepSeek-V3": ("DeepseekV3", LLAMA | {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, **EXPERTS,
    }),
    "Llama 4": ("Llama4Text", HEADS | LOCAL | {"moe_layers": [0], "intermediate_size_mlp": 512}),  # FFNs of two widths
    "Ernie 4.5 MoE": ("Ernie4_5_Moe", LLAMA | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "MiniMax": ("MiniMax", HEADS | LOCAL),
    "DBRX": ("Dbrx", {
        "vocab_size": WORDS, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 640,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    }),
    "Gemma3n": ("Gemma3nText", HEADS | {
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
        "activation_sparsity_pattern": None,
    }),
    "Gemma3n, sparse": ("Gemma3nText", HEADS | {  # its block has an activation between two linears, which is no FFN
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 32, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0],
    }),
    "Gemma4": ("Gemma4Text", HEADS | {
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16,
        "vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    }),
    "LongCat-Flash": ("LongcatFlash", {  # two attentions a block; some experts have no matrices
        "vocab_size": WORDS, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 96,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 8,
        "v_head_dim": 16, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32,
        "max_position_embeddings": 640,
    }),
    "DeepSeek-V4": ("DeepseekV4", {  # the first block routes by the ids of tokens
        "vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "q_lora_rank": 24, "n_routed_experts": 4, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2,
        "index_head_dim": 16, "index_topk": 8, "sliding_window": 16, "mlp_layer_types": ["hash_moe", "moe"],
        "max_position_embeddings": 640, "partial_rotary_factor": 0.5, **EXPERTS,
    }),
    "Inkling 2": ("Inkling2Text", {  # some parameters stay in float32
        "vocab_size": WORDS, "unpadded_vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 7, "d_rel": 8, "rel_extent": 32,
        "n_routed_experts": 4, "max_position_embeddings": 640, "bos_token_id": 1, "eos_token_id": 2, **EXPERTS,
    }),
    "Doge": ("Doge", LLAMA),  # its config counts experts that it has not
    "GPT": ("OpenAIGPT", GPT),  # the first one: no cache, and a block gives a list
    "BioGPT": ("BioGpt", ENCODER),
    "ModernBERT, decoder": ("ModernBertDecoder", LLAMA | {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}),
    "Arcee": ("Arcee", LLAMA),
    "GPT-Neo": ("GPTNeo", {
        "vocab_size": WORDS, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 640,
        "intermediate_size": 96, "attention_types": [[["global", "local"], 1]], "window_size": 7,
    }),
    "Apertus": ("Apertus", LLAMA),
    "Qwen3-Next": ("Qwen3Next", HEADS | EXPERTS | {
        "num_experts": 4, "shared_expert_intermediate_size": 48, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }),
    "Mamba": ("Mamba", {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "BERT": ("Bert", ENCODER),
    "RoBERTa": ("Roberta", ENCODER),
    "BART": ("Bart", {
        "vocab_size": WORDS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "max_position_embeddings": 640,
    }),
}  # fmt: skip


def load_family(name: str, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A family's model, written to `folder` and read by `load_model`. All norms, biases and matrices are random."""
    write_family(name, folder, dtype)
    return load_model(str(folder), dtype)[0]


def write_family(name: str, folder: Path, dtype: torch.dtype) -> None:
    """Write a family's model with a tokenizer of numbers, as a hub would have it."""
    kind, settings = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    whole = kind == "Bart"  # published with its encoder
    maker = transformers.AutoModelForSeq2SeqLM if whole else transformers.AutoModelForCausalLM
    model = maker.from_config(config)
    for parameter in model.parameters():
        randomise(parameter.data)
    with hub.quiet():
        model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)


def randomise(tensor: torch.Tensor) -> None:
    """Vectors vary around what they are; matrices keep the size of what goes through them."""
    if tensor.ndim == 1:
        tensor.add_(0.3 * torch.randn_like(tensor))
    else:
        tensor.normal_(std=1.5 * tensor.shape[-1] ** -0.5)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
