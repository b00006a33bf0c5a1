"""A Mixtral made from a dense Llama: each expert is the model's FFN and a difference of low rank.

    mixtral = as_mixtral(load_dense(), load(path, dense), torch.bfloat16)

All experts share the dense FFN: one base and the differences would be far cheaper to move than these experts. The model
is written out as an ordinary `MixtralForCausalLM`, because that is what other programs load.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.models.adapters import BASE, fingerprint
from toolkit.models.ffn import decoder_ffns
from toolkit.models.plain import plain
from toolkit.records import line

FILE = "experts.safetensors"  # in the folder of an upcycled model
KIND = "experts of an upcycled model"
PER_TOKEN = "per_token"
TAKEN_OVER = (  # entries of a Llama's config that a Mixtral's has too
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LowRankExperts:
    """Routers, and the difference left · right of each expert's fused gate and up, and of its down projection.

    Sizes: L layers, E experts, F neurons, H hidden, r the rank.
    """

    router: Float[Tensor, "L E H"]
    gate_up_left: Float[Tensor, "L E F2 r"]
    gate_up_right: Float[Tensor, "L E r H"]
    down_left: Float[Tensor, "L E H r"]
    down_right: Float[Tensor, "L E r F"]
    per_token: int

    @property
    def count(self) -> int:
        """Experts of a layer."""
        return self.router.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != PER_TOKEN}


def save(path: str | os.PathLike, base: nn.Module, parts: LowRankExperts, about: Mapping[str, str]) -> None:
    """Replace a file by the parts for a dense model, as bf16. Raises `UserError` for disk trouble."""
    described = {**about, BASE: fingerprint(base), PER_TOKEN: str(parts.per_token)}
    tensor_files.save(path, KIND, described, {name: it.bfloat16().contiguous() for name, it in parts.tensors().items()})


def load(path: str | os.PathLike, base: nn.Module) -> LowRankExperts:
    """The parts of a file, as float32, for this dense model.

    Raises `UserError` for a file that is damaged, of another kind or for another model.
    """
    about, tensors = tensor_files.load(path, KIND)
    if about.get(BASE) != fingerprint(base):
        raise UserError(f"{path}: made for another model ({line(about.get('model'))}); load that one")
    with tensor_files.consistent(path, KIND):
        parts = LowRankExperts(**{name: it.float() for name, it in tensors.items()}, per_token=int(about[PER_TOKEN]))
        _check(base, parts)
    return parts


def _check(base: nn.Module, parts: LowRankExperts) -> None:
    """Raise `ValueError` for parts that do not fit the model."""
    ffns = decoder_ffns(base)
    layers, neurons, hidden = len(ffns), ffns[0].neurons, ffns[0].down.out_features
    experts, rank = parts.count, parts.down_right.shape[2]
    expected = {
        "router": (layers, experts, hidden),
        "gate_up_left": (layers, experts, 2 * neurons, rank),
        "gate_up_right": (layers, experts, rank, hidden),
        "down_left": (layers, experts, hidden, rank),
        "down_right": (layers, experts, rank, neurons),
    }
    if wrong := [name for name, it in parts.tensors().items() if tuple(it.shape) != expected[name]]:
        raise ValueError(f"{wrong[0]} does not fit the model")
    if not 1 <= parts.per_token <= experts or not all(bool(it.isfinite().all()) for it in parts.tensors().values()):
        raise ValueError(f"{parts.per_token} of {experts} experts a token, or a number that is not finite")


@torch.no_grad()
def as_mixtral(base: nn.Module, parts: LowRankExperts, dtype: torch.dtype) -> nn.Module:
    """A `MixtralForCausalLM` in a dtype. Sums of weights and differences are rounded once, from the base's dtype.

    It shares no tensor with the base. Raises `UserError` for a base that is no Llama.
    """
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, MixtralConfig, MixtralForCausalLM

    if not isinstance(base.config, LlamaConfig) or base.config.mlp_bias or base.config.attention_bias:
        raise UserError(f"{type(base).__name__}: only a Llama without biases becomes a Mixtral")
    entries = {name: getattr(base.config, name) for name in TAKEN_OVER}
    config = MixtralConfig(
        **entries, num_local_experts=parts.count, num_experts_per_tok=parts.per_token, sliding_window=None, dtype=dtype
    )
    with init_empty_weights(include_buffers=False):
        model = MixtralForCausalLM(config)
    own = {name: tensor for name, tensor in base.state_dict().items() if ".mlp." not in name}
    weights = {name: tensor.to(dtype, copy=True) for name, tensor in own.items()}
    for layer, ffn in enumerate(decoder_ffns(base)):
        gate_up, down = torch.cat([ffn.gate.weight, ffn.up.weight]), ffn.down.weight
        place = f"model.layers.{layer}.mlp"
        weights[f"{place}.gate.weight"] = parts.router[layer].to(dtype, copy=True)
        for name, dense in {"gate_up": gate_up, "down": down}.items():
            left, right = (getattr(parts, f"{name}_{side}")[layer] for side in ("left", "right"))
            sums = [(dense.float() + one @ other).to(dtype) for one, other in zip(left, right, strict=True)]
            weights[f"{place}.experts.{name}_proj"] = torch.stack(sums)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return plain(model)
