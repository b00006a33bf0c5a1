"""Sizes read off a model against the count of all its parameters, as transformers makes them."""

import pytest
import torch
import transformers

from toolkit.errors import UserError
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.shape_of import BlockSizes, assemble, shape_of

SIZES = {
    "vocab_size": 3000, "hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 2560,
}  # fmt: skip
EXPERTS = SIZES | {"num_experts_per_tok": 2, "num_local_experts": 6, "num_experts": 6, "moe_intermediate_size": 768}
OPT = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")} | {
    "ffn_dim": 4096, "word_embed_proj_dim": 1024, "max_position_embeddings": 8,
}  # fmt: skip
FALCON = {"new_decoder_architecture": True, "num_kv_heads": 4, "vocab_size": 3000, "hidden_size": 1024}
MODELS = {
    "Llama": SIZES,
    "Mistral": SIZES,
    "Qwen2": SIZES | {"tie_word_embeddings": True},
    "Qwen3": SIZES | {"head_dim": 96},
    "Gemma": SIZES | {"head_dim": 256},
    "Gemma2": SIZES | {"head_dim": 256},
    "Gemma3Text": SIZES | {"head_dim": 64},
    "OPT": OPT,
    "Falcon": FALCON | {"num_hidden_layers": 3, "num_attention_heads": 8},
    "Phi": SIZES | {"num_key_value_heads": 8},
    "Mixtral": EXPERTS,
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 2 * 768},
    "Qwen3Moe": EXPERTS,
    "Olmoe": EXPERTS,
}


def outline(family, **settings):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**settings))
    model.tie_weights()
    return model


@pytest.mark.parametrize("family", MODELS)
def test_weights_are_those_of_the_model(family):
    model = outline(family, **MODELS[family])
    shape, total = shape_of(model), sum(weight.numel() for weight in model.parameters())
    assert 0.995 * total < sum(shape.parameters.values()) <= total
    by_part = shape.parameters
    assert by_part["embedding"] == 3000 * 1024
    assert (by_part["head"] == 0) == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    ffn = sum(w.numel() for name, w in model.named_parameters() if "bias" not in name and is_ffn(name, w))
    assert by_part["ffn"] + by_part["experts"] == ffn
    assert (shape.layers, shape.hidden, shape.experts) == (3, 1024, 6 if "experts" in repr(model) else 0)


def is_ffn(name, weight):
    return any(part in name for part in (".mlp.", ".fc1", ".fc2")) and weight.ndim > 1 and "gate.weight" not in name


def test_attention_and_heads_by_hand():
    shape = shape_of(outline("Qwen3", **MODELS["Qwen3"]))
    assert (shape.heads, shape.key_value_heads, shape.head_size, shape.ffn) == (8, 2, 96, 2560)
    assert shape.parameters["attention"] == 3 * 1024 * 96 * (8 + 2 + 2 + 8)
    falcon = shape_of(outline("Falcon", **MODELS["Falcon"]))
    assert (falcon.family, falcon.key_value_heads, falcon.ffn) == ("falcon", 4, 4096)
    mixture = shape_of(outline("Qwen2Moe", **MODELS["Qwen2Moe"]))
    assert (mixture.experts_per_token, mixture.shared_experts, mixture.ffn) == (2, 2, 768)


def test_dense_layers_before_those_with_experts():
    model = outline("Qwen3Moe", **EXPERTS, mlp_only_layers=[0])
    shape = shape_of(model)
    assert (shape.dense_layers, shape.dense_ffn, shape.ffn) == (1, 2560, 768)
    assert shape.parameters["ffn"] == 3 * 1024 * 2560
    assert shape.parameters["experts"] == 2 * 6 * 3 * 1024 * 768


def test_a_published_shape_comes_back():
    shape = ARCHITECTURES["llama2-7b"]
    blocks = [BlockSizes(4 * 4096**2, 11008)] * 32
    sizes = {"hidden": 4096, "vocabulary": 32000, "tied": False, "heads": 32, "head_size": 128}
    assert assemble(blocks, family="llama", **sizes) == shape


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("DeepseekV2", {**EXPERTS, "n_routed_experts": 6, "moe_layer_freq": 1}, "another attention"),
        ("Qwen2Moe", MODELS["Qwen2Moe"] | {"shared_expert_intermediate_size": 1000}, "no multiple"),
        ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [1]}, "differs"),
        ("OPT", OPT | {"word_embed_proj_dim": 512}, "unknown here"),
    ],
)
def test_what_a_shape_cannot_say_is_refused(family, settings, words):
    with pytest.raises(UserError, match=words) as caught:
        shape_of(outline(family, **settings))
    assert "\n" not in str(caught.value)
