"""Whole models as shape-only twins: decoders that run, with random pruned weights and any number of layers."""

import torch
from torch import Tensor, nn

from toolkit import hub
from toolkit.errors import UserError, unknown
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.plain import plain
from toolkit.models.shapes import SHAPES, random_pruned, twin_shapes

VOCABULARY, POSITIONS, HEAD = 1000, 256, 64  # small, since the layers are what is timed; heads have their usual size


def twin_model(
    model: str,
    layers: int,
    dtype: torch.dtype = torch.float16,
    sparsity: float = 0.5,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    alike: bool = False,
) -> nn.Module:
    """An OPT or Llama decoder with layers of a model of `toolkit.models.shapes`, on the CPU, without gradients.

    Every layer has the same weights with its rows in another order, so no layer can stand in for another. With `alike`
    rows keep their order, and all layers share one layer's memory. Embeddings and head are small, unless a `vocabulary`
    is given. Raises `UserError` for an unknown model or a part of one (its
    matrices do not fit together), or fewer than one layer.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    if layers < 1:
        raise UserError(f"layers={layers}: expected 1 or more")
    with hub.quiet(), init_empty_weights(include_buffers=False):
        made = AutoModelForCausalLM.from_config(_config(model, layers, vocabulary), **hub.NO_CODE)
    weights = {
        op: random_pruned(shape, sparsity, dtype, seed + number)
        for number, (op, shape) in enumerate(twin_shapes(model).items())
    }
    torch.manual_seed(seed)
    state = {name: _value(name, parameter, weights, dtype, alike) for name, parameter in made.named_parameters()}
    made.load_state_dict(state, strict=False, assign=True)
    return made.eval().requires_grad_(False)


def twin_mixture(model: str, layers: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """A Mixtral decoder with layers of a mixture of `toolkit.models.architectures`, whose experts have no memory.

    They are on the device "meta": `toolkit.storage.experts.RandomExperts` writes random ones to disk. All else is
    random and on the CPU; embeddings and head are small. A model with shared experts or dense layers gets none of
    these. Raises `UserError` for a model without experts, or fewer than one layer.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, MixtralConfig

    shape = ARCHITECTURES.get(model)
    if shape is None or not shape.experts:
        raise unknown("mixture of experts", model, (name for name, each in ARCHITECTURES.items() if each.experts))
    if layers < 1:
        raise UserError(f"layers={layers}: expected 1 or more")
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        tie_word_embeddings=False,
    )
    with hub.quiet(), init_empty_weights(include_buffers=False):
        made = AutoModelForCausalLM.from_config(config, **hub.NO_CODE)
    torch.manual_seed(seed)
    own = {name: it for name, it in plain(made).named_parameters() if ".experts." not in name}
    state = {name: _value(name, each, {}, dtype, False) for name, each in own.items()}
    made.load_state_dict(state, strict=False, assign=True)
    return made.to(dtype).eval().requires_grad_(False)


def _config(model: str, layers: int, vocabulary: int):
    from transformers import LlamaConfig, OPTConfig

    shapes = twin_shapes(model)
    if model not in SHAPES:
        raise UserError(f"twin model {model!r}: a part of a model does not run; choose one of {', '.join(SHAPES)}")
    hidden = shapes["q_proj"][1]
    common = {
        "vocab_size": vocabulary,
        "max_position_embeddings": POSITIONS,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "tie_word_embeddings": False,
    }
    if "fc1" in shapes:
        return OPTConfig(**common, ffn_dim=shapes["fc1"][0], word_embed_proj_dim=hidden)
    key_value_heads = shapes["k_proj"][0] // HEAD
    return LlamaConfig(**common, intermediate_size=shapes["up_proj"][0], num_key_value_heads=key_value_heads)


def _value(name: str, parameter: Tensor, weights: dict[str, Tensor], dtype: torch.dtype, alike: bool) -> Tensor:
    """A layer's linear gets its weight, rolled unless `alike`. The rest gets small random values, ones in norms and
    zeros in biases.
    """
    *path, op, kind = name.split(".")
    if kind == "weight" and op in weights:
        layer = next(int(part) for part in path if part.isdecimal())
        return weights[op] if alike else weights[op].roll(layer, 0)
    if parameter.ndim > 1:
        return (torch.randn(parameter.shape) * 0.02).to(dtype)
    return torch.full(parameter.shape, float(kind == "weight"), dtype=dtype)
