"""Whole models as shape-only twins: decoders that run, with random pruned weights and any number of layers."""

import torch
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.blocks import cast_parameters
from toolkit.models.shapes import SHAPES, random_pruned, twin_shapes
from toolkit.models.skeleton import empty_model

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
    _check(layers)
    weights = {
        op: random_pruned(shape, sparsity, dtype, seed + number)
        for number, (op, shape) in enumerate(twin_shapes(model).items())
    }
    return _filled(_config(model, layers, vocabulary), dtype, seed, weights, alike)


def twin_mixture(model: str, layers: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """A Mixtral decoder with layers of a mixture of `toolkit.models.architectures`, whose experts have no memory.

    They are on the device "meta": `toolkit.storage.experts.RandomExperts` writes random ones to disk. All else is
    random and on the CPU; embeddings and head are small. A model with shared experts or dense layers gets none of
    these. Raises `UserError` for a model without experts, or fewer than one layer.
    """
    from transformers import MixtralConfig

    shape = ARCHITECTURES.get(model)
    if shape is None or not shape.experts:
        raise unknown("mixture of experts", model, (name for name, each in ARCHITECTURES.items() if each.experts))
    _check(layers)
    config = MixtralConfig(
        **_common(shape.hidden, layers, VOCABULARY, shape.heads),
        intermediate_size=shape.ffn,
        num_key_value_heads=shape.key_value_heads,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
    )
    return _filled(config, dtype, seed, {}, False)


def _check(layers: int) -> None:
    if layers < 1:
        raise UserError(f"layers={layers}: expected 1 or more")


def _common(hidden: int, layers: int, vocabulary: int, heads: int) -> dict[str, int | bool]:
    """The entries that the configurations of all families have."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"vocab_size": vocabulary, "max_position_embeddings": POSITIONS, "tie_word_embeddings": False}


def _config(model: str, layers: int, vocabulary: int):
    from transformers import LlamaConfig, OPTConfig

    shapes = twin_shapes(model)
    if model not in SHAPES:
        raise UserError(f"twin model {model!r}: a part of a model does not run; choose one of {', '.join(SHAPES)}")
    hidden = shapes["q_proj"][1]
    common = _common(hidden, layers, vocabulary, hidden // HEAD)
    if "fc1" in shapes:
        return OPTConfig(**common, ffn_dim=shapes["fc1"][0], word_embed_proj_dim=hidden)
    key_value_heads = shapes["k_proj"][0] // HEAD
    return LlamaConfig(**common, intermediate_size=shapes["up_proj"][0], num_key_value_heads=key_value_heads)


def _filled(config, dtype: torch.dtype, seed: int, weights: dict[str, Tensor], alike: bool) -> nn.Module:
    """The model of a configuration, with these weights of layers and random ones elsewhere; experts have no memory."""
    made = empty_model(config, lambda outline: None)
    torch.manual_seed(seed)
    own = {name: it for name, it in made.named_parameters() if ".experts." not in name}
    state = {name: _value(name, each, weights, dtype, alike) for name, each in own.items()}
    made.load_state_dict(state, strict=False, assign=True)
    cast_parameters(made, dtype)
    return made.eval().requires_grad_(False)


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
