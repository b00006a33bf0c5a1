"""Experts pruned and quantised in place, against each expert's matrices by hand."""

import copy

import pytest
import torch
from torch.nn import functional

from tests.models.test_experts import FAMILIES, mixtures
from tests.models.test_models import LLAMA, small
from toolkit.errors import UserError
from toolkit.models.experts import decoder_experts
from toolkit.pruning import METHODS
from toolkit.pruning.experts import change_experts
from toolkit.quantization.spqr import SpQR

WINDOWS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layer_is_pruned_as_each_matrix_alone(family):
    model = mixtures(family)
    dense, seen = copy.deepcopy(model), []
    first = next(experts for experts in decoder_experts(dense) if experts is not None)
    hook = first.module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    dense(WINDOWS)
    hook.remove()
    count = change_experts(model, METHODS["wanda"], WINDOWS, sparsity=0.5, pattern=None)
    changed = [experts for experts in decoder_experts(model) if experts is not None]
    assert count == 3 * sum(experts.count for experts in changed)
    ids, _ = first.route(seen[0])
    for expert in range(first.count):
        own = torch.stack([x for x, used in zip(seen[0], ids.tolist(), strict=True) if expert in used])
        gate, up, down = first.matrices(expert)
        neurons = functional.silu(own @ gate.T) * (own @ up.T)
        found = changed[0].matrices(expert)
        for before, after, x in zip((gate, up, down.T), (*found[:2], found[2].T), (own, own, neurons), strict=True):
            torch.testing.assert_close(after, METHODS["wanda"](before, x.T @ x, 0.5, None))
    for experts in changed[1:]:
        assert (experts.gate_up == 0).double().mean().item() == pytest.approx(0.5, abs=0.05)


def test_spqr_and_an_expert_that_no_token_uses():
    model = mixtures("Mixtral")
    before = copy.deepcopy(decoder_experts(model)[0])
    before.router[5] = decoder_experts(model)[0].router[5] = -100 * before.router[:5].sum(0)
    change_experts(model, lambda weight, gram: SpQR()(weight, gram).decode(), WINDOWS)
    after = decoder_experts(model)[0]
    assert not torch.equal(after.gate_up, before.gate_up)
    error = (after.gate_up - before.gate_up).norm(dim=(1, 2)) / before.gate_up.norm(dim=(1, 2))
    assert (error < 0.3).all()


def test_a_dense_model_is_refused():
    with pytest.raises(UserError, match="has no experts"):
        change_experts(small("Llama", **LLAMA), METHODS["magnitude"], WINDOWS, sparsity=0.5, pattern=None)
