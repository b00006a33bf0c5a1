"""Mixtures: what their experts and routers are found to be is what the model's own mixture gives."""

import pytest
import torch
from torch.nn import functional

from tests.models.test_models import LLAMA, small
from toolkit.errors import UserError
from toolkit.models.experts import Experts, TopK, block_experts, decoder_experts
from toolkit.models.plain import plain

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
    """The output of the routed experts, token by token and expert by expert."""
    rows = []
    for token in x:
        ids, weights = experts.route(token[None])
        total = torch.zeros(experts.hidden)
        for expert, weight in zip(ids[0].tolist(), weights[0], strict=True):
            gate, up, down = experts.matrices(expert)
            total += weight * ((functional.silu(gate @ token) * (up @ token)) @ down)
        rows.append(total)
    return torch.stack(rows)


def mixtures(family, **changes):
    model = small(family, **FAMILIES[family][0] | changes).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return plain(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_route_and_the_sum_over_experts_are_the_modules_own(family):
    found = [experts for experts in decoder_experts(mixtures(family)) if experts is not None]
    assert len(found) == (1 if family == "DeepseekV2" else 2)
    for experts in found:
        x = torch.randn(5, experts.hidden)
        assert experts.gate.form == FAMILIES[family][1]
        neurons = 48 if family in ("Mixtral", "Olmoe") else 24
        assert (experts.count, experts.neurons, experts.per_token) == (6, neurons, 3)
        assert experts.activation == "silu"
        torch.testing.assert_close(by_hand(experts, x), experts.linears(x, *experts.route(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gate_gives_the_routers_own_choice(family):
    experts = next(it for it in decoder_experts(mixtures(family).to(torch.bfloat16)) if it is not None)
    x = torch.randn(40, experts.hidden, dtype=torch.bfloat16)
    ids, weights = experts.route(x)
    scores = experts.scores(x)
    assert torch.equal(scores.topk(3).indices.sort(1).values, ids.sort(1).values)
    torch.testing.assert_close(experts.weigh(scores, ids), weights.float(), rtol=0.01, atol=0)


def test_routers_that_are_no_linear_map_route_all_the_same():
    experts = decoder_experts(mixtures("DeepseekV2", n_group=2, topk_group=1, topk_method="group_limited_greedy"))[1]
    ids, _ = experts.route(torch.randn(50, experts.hidden))
    assert (ids // 3 == ids[:, :1] // 3).all()  # of one group
    with pytest.raises(UserError, match="routes by more than a linear map"):
        experts.scores(torch.randn(1, experts.hidden))


def test_a_mixture_of_the_toolkits_own_routes_by_hand():
    """Two experts choose by the sign of the input: no code of transformers runs."""
    router = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    toy = block_experts(TopK(router, torch.ones(2, 2, 2), torch.ones(2, 2, 1), per_token=1))
    assert toy.per_token == 1
    ids, weights = toy.route(torch.tensor([[2.0, 5.0], [-2.0, 5.0]]))
    assert ids.tolist() == [[0], [1]]
    assert weights.shape == (2, 1)
