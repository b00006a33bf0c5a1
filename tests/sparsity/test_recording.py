"""The routing of a model with experts, recorded, and how evenly experts are used."""

import numpy as np
import pandas as pd
import pytest
import torch

from tests.models.test_experts import mixtures as mixture
from tests.notebook_code import functions_of
from toolkit.models.experts import decoder_experts
from toolkit.sparsity.recording import mixtures, record_routing
from toolkit.sparsity.trace import Trace, pack

TOKENS = torch.arange(64) % 31


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe"])
def test_the_trace_is_what_the_modules_routers_choose(family):
    model = mixture(family)
    chosen = []

    def see(module, args, output):
        scores = torch.nn.functional.linear(args[0].float().reshape(-1, args[0].shape[-1]), module.weight.float())
        chosen.append(scores.topk(3, dim=-1).indices)

    routers = [each.module.gate for each in mixtures(model)]
    handles = [router.register_forward_hook(see) for router in routers]
    trace = record_routing(model, "tiny", TOKENS, "numbers", windows=2, sequence_length=8)
    for handle in handles:
        handle.remove()
    assert (trace.unit, trace.model, trace.corpus, list(trace.tokens.shape)) == ("expert", "tiny", "numbers", [2, 8])
    assert trace.layers == len([each for each in decoder_experts(model) if each])
    for layer in range(trace.layers):
        for window in range(2):
            ids = chosen[window * trace.layers + layer]
            by_hand = torch.zeros(8, 6, dtype=torch.bool).scatter_(1, ids, True)
            assert torch.equal(trace.active(layer)[window], by_hand)
            assert ((trace.weights[layer][window] > 0) == by_hand).all()
    if family == "Mixtral":
        torch.testing.assert_close(trace.weights[0].sum(-1), torch.ones(2, 8))


def routing(active):
    active = torch.tensor(active, dtype=torch.bool)[None]
    ids = torch.zeros(active.shape[:2], dtype=torch.int32)
    return Trace("tiny", "by hand", ids, (active.shape[2],), (pack(active),), "expert", None, (active.float(),))


def test_balance_by_hand():
    """Five experts, four tokens, one each: three for expert 0, one for 1. The mean is 0.8, the most used fifth is 0."""
    found = functions_of("corm/fig06").balance(
        routing([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    )
    wanted = {"layer": [0], "experts": 5, "per_token": 1.0, "imbalance": 3.75, "top_share": 0.75, "never": 0.6}
    wanted |= {"entropy": 2 - 0.75 * np.log2(3)}
    pd.testing.assert_frame_equal(found[list(wanted)], pd.DataFrame(wanted))
    assert found["over_least"].isna().all()  # the least used one is never used
    assert 2 < found["by_chance"].item() < 3.75
