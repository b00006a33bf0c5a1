"""The cost model of loading experts, by hand and at its limits."""

from dataclasses import replace

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.evidence.claims import claims
from toolkit.machines.hardware import profile
from toolkit.machines.machine import Links, Memory, Profile, Software
from toolkit.models.architectures import ARCHITECTURES, ModelShape
from toolkit.papers.corm.cost_model import (
    CORM,
    LOADING,
    ON_DEMAND,
    PREFETCHED,
    RIVALS,
    SCHEDULINGS,
    SPARSE,
    LoadingInputs,
    beside_s,
    expert_bytes,
    prompt,
    prompt_loads,
    slots_that_fit,
    token,
    weight_bits,
)
from toolkit.residency.two_level import TwoLevel

MIXTRAL, DEEPSEEK = ARCHITECTURES["mixtral-8x7b"], ARCHITECTURES["deepseek-moe-16b"]
MACHINE = profile("corm-rtx3090ti")
# one layer, 4 experts of 3 × 1024 weights, 2 of them used; attention 4096, router 128, head 256 weights
TINY = ModelShape(1, 32, 32, 2, 8, 2, 16, experts=4, experts_per_token=2)
EXPERT_NBYTES = 3 * 1024 * 4.25390625 / 8
LOAD_S = 3.0  # of an expert, on this machine: 1 s fixed, 2 s for its bytes
SLOW = Profile(
    id="slow",
    title="slow",
    paper=None,
    device=Memory("GPU", 1e9, 1e9, matvec_gb_s={"dense": 2 * 1024 / 1e9}),  # 1024 weights a second
    links=Links(dram_to_device_gb_s=EXPERT_NBYTES / 2 / 1e9, dram_to_device_fixed_s=1.0),
    software=Software("host", layer_s=0.5),
)
DENSE_S, HEAD_S, EXPERTS_S = 0.5 + (4096 + 128) / 1024, 0.25, 6.0


def test_one_token_by_hand():
    """One layer, two of four experts: each waits for the one before."""
    on_demand = token(TINY, ON_DEMAND, SLOW)
    assert on_demand.total_s == pytest.approx(DENSE_S + 2 * LOAD_S + EXPERTS_S + HEAD_S)
    assert on_demand.busy_s(*LOADING) == pytest.approx(2 * LOAD_S)
    assert beside_s(on_demand) == pytest.approx(0)
    # W1 is a third of an expert; of the others 0.45 take 0.45 / 0.75 of their time: a third of that is gathering
    sparse = token(TINY, SPARSE, SLOW)
    assert sparse.busy_s("copy") == pytest.approx(2 * (1 + 2 * 0.45), rel=1e-3)
    assert sparse.busy_s("manage") == pytest.approx(2 * 2 * 0.45 / 3, rel=1e-3)
    assert sparse.total_s == pytest.approx(DENSE_S + 2 * (1 + 2 * 0.6) + EXPERTS_S + HEAD_S)


def test_two_layers_by_hand():
    """The second layer's loads run beside the first one's products, whose own loads come on demand.

    loader  |dense| W1 W1 n n | W1 W1 (waits for predictors) n n |
    GPU     |dense|           | experts | predictor × 2 | dense | experts | head
    """
    two = replace(TINY, layers=2)
    found = token(two, PREFETCHED, SLOW)
    demanded_s, predictor_s = 2 * (1 + 1.2), 1.0
    ready_s = DENSE_S + demanded_s + EXPERTS_S  # W1 of both experts came in 2 s beside the products
    neurons_s = max(ready_s + predictor_s + 2 * 1.2, ready_s + 2 * predictor_s + 1.2)
    computed_s = max(ready_s + 2 * predictor_s + DENSE_S, neurons_s) + EXPERTS_S
    assert found.total_s == pytest.approx(computed_s + HEAD_S)


def test_a_prefetched_expert_that_was_mispredicted_is_loaded_on_demand():
    two, scheduling = replace(TINY, layers=2), RIVALS["mixtral-offload"]
    inputs = LoadingInputs(accuracy=0.75, hit_rate=0.0)
    loaded = token(two, scheduling, SLOW, inputs).busy_s(*LOADING)
    assert loaded == pytest.approx(2 * LOAD_S * (2 + 0.25))  # both layers, and a quarter of the second again
    assert token(two, replace(scheduling, exact=False), SLOW, inputs).busy_s(*LOADING) == pytest.approx(2 * LOAD_S * 2)
    # four tokens use all four experts, two tokens each: one is loaded on demand if it was foretold for neither
    of_prompt = prompt(two, scheduling, SLOW, 4, inputs).busy_s(*LOADING)
    assert of_prompt == pytest.approx(4 * LOAD_S * (2 + 0.25**2))


def test_the_fit_gives_back_the_papers_baselines():
    """Table 3's four inputs, through the profile's four numbers; `corm/tab03` fits them."""
    published = claims("corm").set_index("id")["value"]
    for name, shape in {"mixtral": MIXTRAL, "deepseek": DEEPSEEK}.items():
        found = token(shape, ON_DEMAND, MACHINE)
        for what, seconds in {
            "loading": found.busy_s(*LOADING),
            "compute": found.busy_s("compute"),
            "token": found.total_s,
        }.items():
            assert 1e3 * seconds == pytest.approx(published[f"tab03-{name}-{what}"], rel=1e-3)


def test_bits_of_a_weight_count_both_levels_of_scales():
    """4 bits in groups of 64, 2 bits in groups of 16: 16 bits a group, 64 for 256 and 128 groups."""
    assert weight_bits(4) == 4 + 16 / 64 + 64 / (64 * 256)
    assert weight_bits(2) == 2 + 16 / 16 + 64 / (16 * 128)
    assert weight_bits(16) == 16
    half = LoadingInputs(low_bits=0.5)
    assert expert_bytes(TINY, SPARSE, half) == pytest.approx(3072 * (weight_bits(4) + weight_bits(2)) / 16)
    assert expert_bytes(TINY, ON_DEMAND, half) == 3072 * weight_bits(4) / 8


def test_slots_that_fit_the_papers_gpu():
    """INT4 Mixtral's experts take 24.0 GB of 25.8: all but one of a layer. DeepSeekMoE fits."""
    assert slots_that_fit(MIXTRAL, MACHINE, ON_DEMAND) == 7
    assert slots_that_fit(DEEPSEEK, MACHINE, ON_DEMAND) == 64
    assert slots_that_fit(MIXTRAL, MACHINE, RIVALS["offloading"]) == 1


def test_hits_are_those_of_a_replayed_cache():
    """Experts and neurons drawn alike and independently, through the cache that the runtime has."""
    rng, inputs = np.random.default_rng(0), LoadingInputs(slots=3, active=0.3)
    cache = TwoLevel(experts=8, neurons=64, slots=3)
    shape = replace(TINY, experts=8)
    hits, cached, tokens = 0, [], 3000
    for _ in range(tokens):
        needed = {int(expert): np.flatnonzero(rng.random(64) < 0.3) for expert in rng.choice(8, 2, replace=False)}
        before = {expert: cache.held(expert) for expert in needed if cache.slot_of[expert] >= 0}
        hits += len(before)
        cached += [held[needed[expert]].mean() for expert, held in before.items() if len(needed[expert])]
        cache.step(needed)
    assert hits / (2 * tokens) == pytest.approx(inputs.expert_hits(shape), abs=0.02)
    assert np.mean(cached) == pytest.approx(inputs.neuron_hits(shape), abs=0.02)


def test_a_prompt_loads_all_experts_and_neurons():
    uses = prompt_loads(MIXTRAL, CORM, 64)
    assert (uses.experts, uses.tokens_each, uses.whole) == (8, 16, True)
    assert prompt_loads(DEEPSEEK, CORM, 64).experts == 64
    assert prompt_loads(MIXTRAL, CORM, 1).experts == 2
    on_demand = prompt(MIXTRAL, ON_DEMAND, MACHINE, 64)
    assert on_demand.busy_s(*LOADING) == pytest.approx(4 * 2.1, rel=1e-3)  # 256 experts of 64
    with pytest.raises(UserError, match="0 tokens"):
        prompt(MIXTRAL, CORM, MACHINE, 0)


def test_ways_have_the_names_they_are_found_by():
    assert all(scheduling.name == name for name, scheduling in SCHEDULINGS.items())
