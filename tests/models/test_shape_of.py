"""Sizes read off a model's tensors."""

import pytest
import torch
import transformers

from tests.families import FAMILIES
from toolkit.errors import UserError
from toolkit.models.plain import RoutedExperts, plain
from toolkit.models.shape_of import shape_of

SIZES = {
    "vocab_size": 3000, "hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 2560,
}  # fmt: skip
EXPERTS = SIZES | {"num_experts_per_tok": 2, "num_local_experts": 6, "num_experts": 6, "moe_intermediate_size": 768}


def outline(family, **settings):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**settings))
    model.tie_weights()
    return plain(model)


REFUSED = {  # families without one shape for all blocks
    "DeepSeek-V4": "does not choose experts by its input alone",
    "Llama 4": "another FFN",
    "Gemma3n, sparse": "another FFN",
}


@pytest.mark.parametrize(("family", "words"), REFUSED.items())
def test_blocks_without_one_shape_are_refused(family, words):
    kind, settings = FAMILIES[family]
    with pytest.raises(UserError, match=words):
        shape_of(outline(kind, **settings))


def test_every_weight_of_every_family_is_counted():
    for family in FAMILIES.keys() - {"BERT", "RoBERTa", "BART", *REFUSED}:
        kind, settings = FAMILIES[family]
        model = outline(kind, **settings)
        shape = shape_of(model)
        stored = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}
        assert sum(shape.parameters.values()) == sum(stored.values()), family
        assert shape.layers == 2, family
        assert all(count >= 0 for count in shape.parameters.values()), family
        has_experts = any(isinstance(module, RoutedExperts) for module in model.modules())
        assert (shape.experts > 0) == has_experts, family


def test_mixtures_by_hand():
    shape = shape_of(outline("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=2 * 768))
    assert (shape.experts, shape.experts_per_token, shape.shared_experts, shape.ffn) == (6, 2, 2, 768)
    assert shape.parameters["experts"] == 3 * (6 + 2) * 3 * 1024 * 768
    shape = shape_of(outline("Qwen3Moe", **EXPERTS, mlp_only_layers=[0]))
    assert (shape.dense_layers, shape.dense_ffn, shape.ffn) == (1, 2560, 768)
    assert shape.parameters["ffn"] == 3 * 1024 * 2560
    assert shape.parameters["experts"] == 2 * 6 * 3 * 1024 * 768
