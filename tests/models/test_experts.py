"""Experts as views: what they route and give is what the model's own mixture gives."""

import pytest
import torch
from torch.nn import functional

from tests.models.test_models import LLAMA, SMALL, small
from toolkit.errors import UserError
from toolkit.models import decoder_blocks
from toolkit.models.experts import Experts, decoder_experts

SIZES = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES = {
    "Mixtral": (LLAMA | {"num_local_experts": 6, "num_experts_per_tok": 3}, "renormalised"),
    "Qwen3Moe": (LLAMA | SIZES | {"norm_topk_prob": True, "head_dim": 8}, "renormalised"),
    "Qwen2Moe": (LLAMA | SIZES | {"norm_topk_prob": False, "shared_expert_intermediate_size": 40}, "softmax"),
    "Olmoe": (LLAMA | SIZES | {"norm_topk_prob": False}, "softmax"),
    "DeepseekV2": (LLAMA | DEEPSEEK | {"topk_method": "greedy", "routed_scaling_factor": 1.5}, "softmax"),
}


def by_hand(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """A mixture's output, token by token and expert by expert."""
    rows = []
    for token in x:
        ids, weights = experts.route(token[None])
        total = torch.zeros(experts.hidden)
        for expert, weight in zip(ids[0].tolist(), weights[0], strict=True):
            gate, up, down = experts.matrices(expert)
            total += weight * ((functional.silu(gate @ token) * (up @ token)) @ down)
        if (shared := experts.shared) is not None:
            output = shared.down @ (functional.silu(shared.gate @ token) * (shared.up @ token))
            total += output if shared.share is None else torch.sigmoid(shared.share @ token) * output
        rows.append(total)
    return torch.stack(rows)


def mixtures(family, **changes):
    model = small(family, **FAMILIES[family][0] | changes).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_route_and_the_sum_over_experts_are_the_modules_own(family):
    model = mixtures(family)
    found = [experts for experts in decoder_experts(model) if experts is not None]
    assert len(found) == (1 if family == "DeepseekV2" else 2)
    for experts in found:
        x = torch.randn(5, experts.hidden)
        assert experts.form == FAMILIES[family][1]
        neurons = 48 if family in ("Mixtral", "Olmoe") else 24
        assert (experts.count, experts.neurons, experts.per_token) == (6, neurons, 3)
        torch.testing.assert_close(by_hand(experts, x), experts.module(x[None])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_route_gives_the_routers_own_experts_in_falling_order(family):
    model = mixtures(family).to(torch.bfloat16)
    experts = next(experts for experts in decoder_experts(model) if experts is not None)
    x = torch.randn(40, experts.hidden, dtype=torch.bfloat16)
    ids, weights = experts.route(x)
    _, _, expected = experts.module.gate(x)
    assert (ids.sort(1).values == expected.sort(1).values).all()
    scores = experts.scores(x).gather(1, ids)
    assert (scores.diff(dim=1) <= 0).all()
    assert weights.dtype == torch.float32
    assert (weights.diff(dim=1) <= 0).all()


def test_views_share_the_models_memory():
    model = mixtures("Mixtral")
    experts = decoder_experts(model)[1]
    gate, up, down = experts.matrices(4)
    fused = decoder_blocks(model)[1].mlp.experts
    gate.fill_(1)
    up.fill_(2)
    down.fill_(3)
    assert (fused.gate_up_proj[4, :48] == 1).all()
    assert (fused.gate_up_proj[4, 48:] == 2).all()
    assert (fused.down_proj[4] == 3).all()
    assert not (fused.down_proj[3] == 3).any()
    assert experts.module is decoder_blocks(model)[1].mlp


def test_dense_blocks_are_none():
    model = small("Llama", **LLAMA)
    assert decoder_experts(model) == [None, None]
    assert decoder_experts(mixtures("DeepseekV2"))[0] is None


@pytest.mark.parametrize("expert", [-1, 6])
def test_an_expert_beyond_the_router_is_refused(expert):
    with pytest.raises(UserError, match=rf"expert {expert}: the block has experts 0 to 5"):
        decoder_experts(mixtures("Mixtral"))[0].matrices(expert)


def test_unknown_routers_and_methods_are_refused():
    settings = LLAMA | DEEPSEEK | {"n_group": 2}
    model = small("DeepseekV3", **settings)
    with pytest.raises(UserError, match="block 1 routes by DeepseekV3TopkRouter; known are MixtralTopKRouter"):
        decoder_experts(model)
    with pytest.raises(UserError, match="block 1 routes by the method 'group_limited_greedy'"):
        decoder_experts(mixtures("DeepseekV2", topk_method="group_limited_greedy"))
    small_oss = SMALL | {"intermediate_size": 32, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 8}
    with pytest.raises(UserError, match="block 0 routes by GptOssTopKRouter"):
        decoder_experts(small("GptOss", **small_oss))


def test_fused_parameters_of_another_shape_are_refused():
    model = mixtures("Mixtral")
    experts = decoder_blocks(model)[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.transpose(1, 2).contiguous())
    with pytest.raises(UserError, match="block 1: its fused experts"):
        decoder_experts(model)
