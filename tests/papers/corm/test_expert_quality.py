"""Foretold experts and skipped neurons against a token-by-token oracle; weights are as before afterwards."""

import pytest
import torch
from torch.nn import functional

from tests.models.test_experts import FAMILIES
from tests.models.test_models import small
from toolkit.models.plain import plain
from toolkit.papers.corm import expert_quality
from toolkit.papers.corm.expert_quality import as_predicted, routed_output
from toolkit.sparsity.recording import mixtures
from toolkit.studies.quality import EvaluationSettings

TOKENS = torch.arange(1, 9)[None]


@pytest.fixture(params=["Mixtral", "DeepseekV2"])  # weights that add up to one, and scaled ones with shared experts
def model(request):
    changes = FAMILIES[request.param][0]
    if request.param == "DeepseekV2":  # its attention has as many keys as queries
        changes = changes | {"num_key_value_heads": changes["num_attention_heads"]}
    made = small(request.param, **changes).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return plain(made)


def by_hand(experts, x, before, limit):
    rows = []
    for token, earlier in zip(x, before, strict=True):
        ids = experts.scores(earlier[None]).topk(experts.per_token).indices
        weights = experts.weigh(experts.scores(token[None]), ids)
        total = torch.zeros(experts.hidden)
        for expert, weight in zip(ids[0].tolist(), weights[0], strict=True):
            gate, up, down = experts.matrices(expert)
            inner = functional.silu(gate @ token) * (up @ token)
            total += weight * (inner * (functional.silu(gate @ earlier).abs() > limit)) @ down
        rows.append(total)
    return torch.stack(rows)


def test_a_mixtures_output_is_that_of_the_oracle(model):
    experts = mixtures(model)[-1]
    x, before = torch.randn(2, 5, experts.hidden)
    for limit in (-1.0, 0.3, 1e9):
        found = routed_output(experts, x, before, "silu", limit)
        torch.testing.assert_close(found, by_hand(experts, x, before, limit), rtol=1e-4, atol=1e-5)


def test_each_mixture_sees_the_input_of_the_one_before(model):
    inputs, outputs = {}, {}
    found = mixtures(model)
    with as_predicted(model, thresholds=[0.05] * len(found)):

        def keep(number):
            def look(_, args, output):
                inputs[number], outputs[number] = args[0], output

            return look

        handles = [each.routed.register_forward_hook(keep(n)) for n, each in enumerate(found)]
        model(TOKENS)
        for handle in handles:
            handle.remove()
    last = len(outputs) - 1
    before = inputs[last - 1] if last else inputs[last]
    expected = by_hand(mixtures(model)[last], inputs[last], before, 0.05)
    torch.testing.assert_close(outputs[last].reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def test_rounding_is_undone(model, monkeypatch):
    monkeypatch.setattr(expert_quality, "loaded", lambda name: (model, None, "checksum"))
    monkeypatch.setattr(expert_quality, "GROUPS", {4: 8, 2: 4})  # that divide these sizes
    weights = expert_quality._matrices(model)
    dense = {name: [each.clone() for each in group] for name, group in weights.items()}
    expected = model(TOKENS).logits
    routers = {each.gate.weight.data_ptr() for each in mixtures(model)}
    assert not routers & {each.data_ptr() for group in weights.values() for each in group}
    with expert_quality.ExpertVariant(None, bits=2).change(EvaluationSettings("tiny")):
        assert not torch.allclose(model(TOKENS).logits, expected)
        assert all(map(torch.equal, weights["attention"], dense["attention"]))
    assert torch.equal(model(TOKENS).logits, expected)
