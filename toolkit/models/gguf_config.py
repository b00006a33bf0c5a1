"""The header of a GGUF file as a configuration of transformers: every key is applied, harmless, or refuses the file.

    config = config_of(read_header(Path("model.gguf")))

A header holds what llama.cpp's converter wrote of a config.json (`convert_hf_to_gguf.py`, `gguf.constants.Keys`).
llama.cpp knows the rest by the architecture's name (`src/llama-model.cpp`): such values stand in `FAMILIES`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolkit.errors import UserError
from toolkit.models.gguf_header import LONG, ROTARY, SHORT, GgufHeader, decoded
from toolkit.records import line

# keys that do not change what the model computes: sizes that tensors have, notes, and YaRN's where nothing is scaled
YARN = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
HARMLESS = ("vocab_size", "pooling_type", "tensor_data_layout", "rope.scaling.finetuned", *YARN)
# keys of what other architectures do, with the values that say that this one does not
NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 0),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}
TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # llama_expert_gating_func_type
RMS, LAYER = ("attention.layer_norm_rms_epsilon", "rms_norm_eps"), ("attention.layer_norm_epsilon", "layer_norm_eps")
BIAS = {"attention_bias": "attn_output.bias"}
BIASES = BIAS | {"mlp_bias": "ffn_down.bias"}
LOGITS = {"logit_scale": "logit_scale"}
SLIDING, FULL = "sliding_attention", "full_attention"
THETA = 10_000.0  # llama.cpp's, where the header has none


class Values:
    """The values of an architecture's keys. It notes which were used, so that none is forgotten."""

    def __init__(self, header: GgufHeader):
        self.header, self.prefix = header, f"{header.architecture}."
        own = (key for key in header.metadata if key.startswith(self.prefix))
        self.unused = {key.removeprefix(self.prefix): header.metadata[key] for key in own}

    def take(self, key: str, default: Any = None) -> Any:
        """A value; of an array the one that all blocks share. Raises `UserError` for blocks that differ."""
        value = self.unused.pop(key, None)
        if isinstance(value, list):
            if any(item != value[0] for item in value):
                raise self.refusal(key, value, "one value for all blocks")
            value = value[0] if value else None
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """A number. Raises `UserError` if the header has none and there is no default."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refusal(key, value, "a number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise self.refusal(key, value, "a positive whole number")
        return int(value)

    def refusal(self, key: str, value: object, expected: str) -> UserError:
        """The error for a value that cannot be applied."""
        return UserError(f"its {self.prefix}{key} is {line(repr(value)):.60}; expected {expected}")

    def has(self, tensor: str) -> bool:
        """Whether the first block has a tensor."""
        return f"blk.0.{tensor}" in self.header.tensors

    def check_used(self) -> None:
        """Raise `UserError` for a value that nothing used and that may change what the model computes."""
        for key, value in self.unused.items():
            if key not in HARMLESS and not (key in NEUTRAL and value in NEUTRAL[key]):
                raise self.refusal(key, value, "none: the toolkit cannot apply this value to this architecture")


@dataclass(frozen=True)
class Family:
    """How a header of one architecture becomes a configuration."""

    model: str
    """The model type in transformers."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Fields of the configuration by keys of the header that only some architectures have; all are needed."""
    norm: tuple[str, str] = RMS
    flags: Mapping[str, str] = field(default_factory=dict)
    """Fields that are true if the first block has a tensor."""
    adjust: Callable[[Values, dict[str, Any]], None] = lambda values, fields: None
    """Sets what needs more than a table."""
    partial: bool = False
    """Whether only the first dimensions of a head may be rotated."""
    experts: str = ""
    """The field for the number of experts; empty for a dense model."""
    gating: int = SOFTMAX
    normed: bool = True
    """Whether the weights of the experts of a token add up to 1."""
    norm_field: str = ""
    """The field that says so; empty if the model always does as `normed` says."""


def config_of(header: GgufHeader) -> Any:
    """The configuration of transformers for a file's model, without the file's tokenizer.

    Raises `UserError` as `fields_of` does, and for values that transformers refuses.
    """
    import transformers

    model, fields = fields_of(header)
    try:
        return transformers.AutoConfig.for_model(model, **fields)
    except Exception as error:  # whatever transformers refuses
        raise UserError(f"its header describes no model of transformers: {line(error)}") from error


def fields_of(header: GgufHeader) -> tuple[str, dict[str, Any]]:
    """The model type of transformers and the fields of its configuration, without transformers.

    Raises `UserError`, which names the key, for a value that is missing, wrong or cannot be applied.
    """
    family, values = FAMILIES[str(header.architecture)], Values(header)
    fields = _sizes(values)
    fields |= {name: values.number(key) for key, name in family.keys.items()}
    fields |= {name: values.has(tensor) for name, tensor in family.flags.items()}
    key, name = family.norm
    if name:
        fields[name] = values.number(key)
    if family.experts:
        _route(values, family, fields)
    fields["rope_parameters"] = _rope(values, fields["head_dim"], family.partial)
    family.adjust(values, fields)
    _check_scale(values, fields)
    values.check_used()
    return fields.pop("model", family.model), fields


def _sizes(values: Values) -> dict[str, Any]:
    header = values.header
    if "token_embd.weight" not in header.tensors:
        raise UserError("it lacks the token embedding, token_embd.weight")
    vocabulary, hidden = header.tensors["token_embd.weight"].shape
    heads, width = values.count("attention.head_count"), values.count("embedding_length")
    if width != hidden:
        raise values.refusal("embedding_length", width, f"{hidden}, the columns of token_embd.weight")
    head_dim = values.count("attention.key_length", hidden // heads)
    if (value_dim := values.number("attention.value_length", head_dim)) != head_dim:
        expected = f"{value_dim}, as {values.prefix}attention.value_length has"
        raise values.refusal("attention.key_length", head_dim, expected)
    if (count := values.number("block_count")) != header.blocks:
        raise values.refusal("block_count", count, f"{header.blocks}, the blocks that it has tensors of")
    tokens = {name: header.metadata.get(key) for name, key in TOKENS.items()}
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "head_dim": head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": values.count("attention.head_count_kv", heads),
        "num_hidden_layers": count,
        "intermediate_size": values.number("feed_forward_length", 0),
        "max_position_embeddings": values.count("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{name: token if type(token) is int and token < vocabulary else None for name, token in tokens.items()},
    }


def _route(values: Values, family: Family, fields: dict[str, Any]) -> None:
    """The fields of a mixture of experts."""
    fields[family.experts] = count = values.count("expert_count")
    fields["num_experts_per_tok"] = used = values.count("expert_used_count")
    if used > count:
        raise values.refusal("expert_used_count", used, f"at most {count}, the number of experts")
    gating, normed = values.take("expert_gating_func", family.gating), values.take("expert_weights_norm", family.normed)
    if not isinstance(normed, bool):
        raise values.refusal("expert_weights_norm", normed, "true or false")
    if gating != family.gating:
        raise values.refusal("expert_gating_func", gating, f"{family.gating}, as this architecture has")
    if family.norm_field:
        fields[family.norm_field] = normed
    elif normed != family.normed:
        raise values.refusal("expert_weights_norm", normed, f"{family.normed}, as this architecture has")
    down = values.header.tensors.get("blk.0.ffn_down_exps.weight")
    if down is None:
        raise UserError("it lacks the experts, blk.0.ffn_down_exps.weight")
    width = values.number("expert_feed_forward_length", down.shape[-1])
    fields["moe_intermediate_size" if family.model.startswith("qwen") else "intermediate_size"] = width


def _check_scale(values: Values, fields: Mapping[str, Any]) -> None:
    """Raise `UserError` for a scale of queries that the model does not have."""
    scale, usual = values.take("attention.scale"), fields.get("query_pre_attn_scalar", fields["head_dim"]) ** -0.5
    if scale and not math.isclose(scale, usual, rel_tol=1e-5):
        raise values.refusal("attention.scale", scale, f"{usual:.6g}, which this architecture has")


def _rope(values: Values, head_dim: int, partial: bool) -> dict[str, Any]:
    """The parameters of rotary embeddings. Raises `UserError` for a scaling that transformers does not have."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(values.number("rope.freq_base", THETA))}
    dimensions = values.number("rope.dimension_count", head_dim)
    if partial:
        rope["partial_rotary_factor"] = dimensions / head_dim
    if dimensions != (int(head_dim * rope["partial_rotary_factor"]) if partial else head_dim):
        raise values.refusal("rope.dimension_count", dimensions, f"{head_dim}, the size of a head")
    return rope | _scaling(values, dimensions)


def _scaling(values: Values, dimensions: int) -> dict[str, Any]:
    """How frequencies are scaled for long texts, if they are; llama.cpp's defaults where the header is silent."""
    vectors = [name for name in (ROTARY, SHORT, LONG) if name in values.header.tensors]
    factor = values.number("rope.scaling.factor", 0) or values.number("rope.scale_linear", 0)
    if vectors and factor not in (0, 1):
        raise values.refusal("rope.scaling.factor", factor, f"none beside the tensor {vectors[0]}")
    kind = values.take("rope.scaling.type", "linear" if factor else "none")
    trained = values.header.size("context_length")
    rope = {"original_max_position_embeddings": values.number("rope.scaling.original_context_length", trained)}
    if vectors and kind in ("none", "longrope"):
        return {"rope_type": "longrope"} | rope | _longrope(values, vectors, dimensions)
    if vectors or kind not in ("none", "linear", "yarn"):
        raise values.refusal("rope.scaling.type", kind, "none, linear, yarn, or longrope with tensors of factors")
    if kind == "none" or factor in (0, 1):
        return {}
    if factor < 1:
        raise values.refusal("rope.scaling.factor", factor, "1 or more")
    scaled = {"rope_type": kind, "factor": float(factor)}
    return scaled if kind == "linear" else scaled | rope | _yarn(values, factor)


def _yarn(values: Values, factor: float) -> dict[str, Any]:
    """Peng et al., "YaRN", 2023: the factor of queries and keys, and the turns between which frequencies change."""
    if (extrapolation := values.number("rope.scaling.yarn_ext_factor", 1)) not in (-1, 1):
        raise values.refusal("rope.scaling.yarn_ext_factor", extrapolation, "1")
    attention = values.number("rope.scaling.attn_factor", 1) * values.number("rope.scaling.yarn_attn_factor", 1)
    return {
        "attention_factor": attention * (1 + 0.1 * math.log(factor)),
        "beta_fast": float(values.number("rope.scaling.yarn_beta_fast", 32)),
        "beta_slow": float(values.number("rope.scaling.yarn_beta_slow", 1)),
    }


def _longrope(values: Values, vectors: list[str], dimensions: int) -> dict[str, Any]:
    """Numbers that divide the frequencies, of short and of long texts. Llama 3 has the same ones for both."""
    if vectors not in ([ROTARY], [SHORT, LONG]):
        raise UserError(f"it has {', '.join(vectors)}; expected both {SHORT} and {LONG}, or neither")
    short, long = (_factors(values, name, dimensions) for name in (vectors[0], vectors[-1]))
    attention = float(values.number("rope.scaling.attn_factor", 1))
    return {"short_factor": short, "long_factor": long, "attention_factor": attention}


def _factors(values: Values, name: str, dimensions: int) -> list[float]:
    """The numbers that divide the frequencies of rotary embeddings, one a pair of dimensions."""
    tensor = values.header.tensors[name]
    if tensor.shape != (dimensions // 2,):
        expected = f"({dimensions // 2},), half of {values.prefix}rope.dimension_count"
        raise UserError(f"its {name} has shape {tensor.shape}; expected {expected}")
    factors = decoded(tensor)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise UserError(f"its {name} has numbers that are not positive")
    return factors.tolist()


def _window_of(values: Values, default: int | None = None) -> int | None:
    """The tokens that a sliding window sees; None for 0, which is no window."""
    window = values.number(key := "attention.sliding_window", default)
    if window != int(window) or window < 0:
        raise values.refusal(key, window, "a whole number of tokens")
    return int(window) or None


def _slide(values: Values, fields: dict[str, Any], period: int, window: int | None = None) -> None:
    """A sliding window in all blocks but every `period`-th, unless the header has a pattern."""
    fields["sliding_window"] = _window_of(values, window)
    count, key = fields["num_hidden_layers"], "attention.sliding_window_pattern"
    if isinstance(pattern := values.unused.get(key), list):
        del values.unused[key]
    else:
        period = values.number(key, period)
        pattern = [not period or (number + 1) % period != 0 for number in range(count)]
    if len(pattern) != count:
        raise values.refusal(key, pattern, f"{count} values, one a block")
    fields["layer_types"] = [SLIDING if slides and fields["sliding_window"] else FULL for slides in pattern]


def _llama(values: Values, fields: dict[str, Any]) -> None:
    """Llama, or what converters write as one: Mistral with its window, Mixtral with experts."""
    window = _window_of(values, 0)
    if values.has("ffn_gate_inp.weight"):
        _route(values, MIXTRAL, fields)
        fields["model"] = MIXTRAL.model
    elif window:
        fields["model"] = "mistral"
    if "model" in fields:
        fields["sliding_window"] = window
        del fields["attention_bias"], fields["mlp_bias"]  # tensors of biases are refused by name


def _gemma(blocks: int, period: int, window: int | None) -> Callable[[Values, dict[str, Any]], None]:
    """Gemma 2 or 3; `blocks` are those of its 27 B, whose queries are scaled by the hidden size over the heads."""

    def adjust(values: Values, fields: dict[str, Any]) -> None:
        _slide(values, fields, period, window)
        large = fields["num_hidden_layers"] == blocks
        scalar = fields["hidden_size"] // fields["num_attention_heads"] if large else fields["head_dim"]
        fields["query_pre_attn_scalar"] = scalar
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if period == 2 else {}
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            fields[key] = values.number(key, caps.get(key, 0)) or None

    return adjust


def _gemma_3(values: Values, fields: dict[str, Any]) -> None:
    """Only the blocks without a window have scaled frequencies; the others have a base of their own."""
    _gemma(62, 6, None)(values, fields)
    base = float(values.number("rope.freq_base_swa", THETA))
    fields["rope_parameters"] = {
        FULL: fields["rope_parameters"],
        SLIDING: {"rope_type": "default", "rope_theta": base},
    }


def _gpt_oss(values: Values, fields: dict[str, Any]) -> None:
    _slide(values, fields, 2)
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # as in its config.json; no key of the header says so


def _granite(values: Values, fields: dict[str, Any]) -> None:
    """Scales, which llama.cpp takes for 1 where the header has none, and an FFN beside the experts."""
    scale = values.number("attention.scale", 0) or fields["head_dim"] ** -0.5
    fields |= {
        "attention_multiplier": scale,
        "embedding_multiplier": values.number("embedding_scale", 0) or 1.0,
        "residual_multiplier": values.number("residual_scale", 0) or 1.0,
        "logits_scaling": values.number("logit_scale", 0) or 1.0,
    }
    if width := values.number("expert_shared_feed_forward_length", 0):
        fields |= {"model": "granitemoeshared", "shared_intermediate_size": width}


def _qwen_2_moe(values: Values, fields: dict[str, Any]) -> None:
    shared = values.header.tensors.get("blk.0.ffn_down_shexp.weight")
    width = values.number("expert_shared_feed_forward_length", shared.shape[-1] if shared else 0)
    fields["shared_expert_intermediate_size"] = width


def _olmo(values: Values, fields: dict[str, Any]) -> None:
    """Norms without weights and with a constant of transformers' class; queries, keys and values that are clipped."""
    if not math.isclose(epsilon := values.number("attention.layer_norm_epsilon"), 1e-5, rel_tol=1e-5):
        raise values.refusal("attention.layer_norm_epsilon", epsilon, "1e-5")
    _clip(values, fields)


def _clip(values: Values, fields: dict[str, Any]) -> None:
    fields["clip_qkv"] = values.number("attention.clamp_kqv", 0) or None


def _window(period: int) -> Callable[[Values, dict[str, Any]], None]:
    return lambda values, fields: _slide(values, fields, period, 0)


def _phi_3(values: Values, fields: dict[str, Any]) -> None:
    fields["sliding_window"] = _window_of(values, 0)
    if original := fields["rope_parameters"].get("original_max_position_embeddings"):
        fields["original_max_position_embeddings"] = original


def _stablelm(values: Values, fields: dict[str, Any]) -> None:
    fields["use_parallel_residual"] = bool(values.take("use_parallel_residual", not values.has("ffn_norm.weight")))


MIXTRAL = Family("mixtral", experts="num_local_experts")
EXPERTS, LOCAL = {"experts": "num_experts"}, {"experts": "num_local_experts"}
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", flags=BIASES, adjust=_llama),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", flags=BIAS),
    "qwen2moe": Family("qwen2_moe", adjust=_qwen_2_moe, normed=False, norm_field="norm_topk_prob", **EXPERTS),
    "qwen3moe": Family("qwen3_moe", norm_field="norm_topk_prob", **EXPERTS),
    "phi3": Family("phi3", adjust=_phi_3, partial=True),
    "gemma": Family("gemma"),
    "gemma2": Family("gemma2", adjust=_gemma(46, 2, 4096)),
    "gemma3": Family("gemma3_text", adjust=_gemma_3),
    "gpt-oss": Family("gpt_oss", adjust=_gpt_oss, gating=SOFTMAX_OF_CHOSEN, **LOCAL),
    "minimax-m2": Family("minimax_m2", gating=SIGMOID, partial=True, **LOCAL),
    "granite": Family("granite", flags=BIASES, adjust=_granite),
    "granitemoe": Family("granitemoe", adjust=_granite, **LOCAL),
    "olmo": Family("olmo", norm=("", ""), adjust=_olmo),
    "olmo2": Family("olmo2"),
    "olmoe": Family("olmoe", adjust=_clip, normed=False, norm_field="norm_topk_prob", **EXPERTS),
    "smollm3": Family("smollm3", flags=BIASES),
    "arcee": Family("arcee", flags=BIASES),
    "command-r": Family("cohere", LOGITS, LAYER, BIAS | {"use_qk_norm": "attn_q_norm.weight"}),
    "cohere2": Family("cohere2", LOGITS, LAYER, BIAS, adjust=_window(4)),
    "starcoder2": Family("starcoder2", norm=(LAYER[0], "norm_epsilon"), flags={"use_bias": "ffn_down.bias"}),
    "stablelm": Family("stablelm", norm=LAYER, flags={"use_qkv_bias": "attn_q.bias"}, adjust=_stablelm, partial=True),
    "nemotron": Family("nemotron", norm=(LAYER[0], "norm_eps"), flags=BIASES, partial=True),
    "seed_oss": Family("seed_oss", flags={"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias"}),
    "glm4": Family("glm4", flags={"attention_bias": "attn_q.bias"}, partial=True),
    "ernie4_5": Family("ernie4_5", flags={"use_bias": "attn_output.bias"}),
    "exaone4": Family("exaone4", adjust=_window(4)),
    "hunyuan-dense": Family("hunyuan_v1_dense", flags=BIAS),
}
