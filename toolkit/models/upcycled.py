"""A Mixtral made from a dense Llama: each expert is the model's FFN and a difference of low rank.

    mixtral = mixtral_from(load_dense(), "experts.safetensors", torch.bfloat16)

All experts share the dense FFN, so one base and the differences would be far cheaper to move than these experts. The
model is written as an ordinary `MixtralForCausalLM`, because other programs load that.

The parts of L layers with E experts of F neurons, for a hidden size of H: `router` [L, E, H], and for each expert's
fused gate and up, and for its down projection, the sides of a difference left · right of rank r: `gate_up_left`
[L, E, 2F, r], `gate_up_right` [L, E, r, H], `down_left` [L, E, H, r] and `down_right` [L, E, r, F].
"""

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models.adapters import load_parts, save_parts
from toolkit.models.ffn import decoder_ffns
from toolkit.models.skeleton import empty_model

KIND = "experts of an upcycled model"
PER_TOKEN = "per_token"
TAKEN_OVER = (  # entries of a Llama's config that a Mixtral's has too
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def save(
    path: str | os.PathLike, base: nn.Module, parts: Mapping[str, Tensor], per_token: int, about: Mapping[str, str]
) -> None:
    """Replace a file by the parts for a dense model, as `save_parts` does."""
    save_parts(path, KIND, base, parts, {**about, PER_TOKEN: str(per_token)})


def mixtral_from(base: nn.Module, path: str | os.PathLike, dtype: torch.dtype) -> nn.Module:
    """The Mixtral that a file makes of a dense model. Raises `UserError` as `load_parts` and `check_llama` do."""
    about, parts = load_parts(path, KIND, base)
    return as_mixtral(base, parts, int(about[PER_TOKEN]), dtype)


def check_llama(base: nn.Module) -> None:
    """Raise `UserError` for a model that is no Llama, or one with biases."""
    from transformers import LlamaConfig

    if not isinstance(base.config, LlamaConfig) or base.config.mlp_bias or base.config.attention_bias:
        raise UserError(f"{type(base).__name__}: only a Llama without biases becomes a Mixtral")


@torch.no_grad()
def as_mixtral(base: nn.Module, parts: Mapping[str, Tensor], per_token: int, dtype: torch.dtype) -> nn.Module:
    """A `MixtralForCausalLM` in a dtype. Sums of weights and differences are rounded once, from the base's dtype.

    It shares no tensor with the base. Raises `UserError` for a base that is no Llama.
    """
    from transformers import MixtralConfig

    check_llama(base)
    entries = {name: getattr(base.config, name) for name in TAKEN_OVER}
    entries |= {"num_local_experts": parts["router"].shape[1], "num_experts_per_tok": per_token}
    model = empty_model(MixtralConfig(**entries, sliding_window=None, dtype=dtype), lambda outline: None)
    own = {name: tensor for name, tensor in base.state_dict().items() if ".mlp." not in name}
    weights = {name: tensor.to(dtype, copy=True) for name, tensor in own.items()}
    for layer, ffn in enumerate(decoder_ffns(base)):
        gate_up, down = torch.cat([ffn.gate.weight, ffn.up.weight]), ffn.down.weight
        place = f"model.layers.{layer}.mlp"
        weights[f"{place}.gate.weight"] = parts["router"][layer].to(dtype, copy=True)
        for name, dense in {"gate_up": gate_up, "down": down}.items():
            lows = zip(parts[f"{name}_left"][layer], parts[f"{name}_right"][layer], strict=True)
            for expert, (left, right) in enumerate(lows):
                ours = f"{place}.experts.{expert}.{name.removeprefix('gate_')}.weight"  # as `plain` names them
                weights[ours] = (dense.float() + left @ right).to(dtype)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model
