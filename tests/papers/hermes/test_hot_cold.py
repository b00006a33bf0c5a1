from dataclasses import replace

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.machines.hardware import profile
from toolkit.machines.machine import GB
from toolkit.papers.hermes.loads import (
    ABLATION,
    NEURONS,
    PROJECTION,
    SYSTEMS,
    Serving,
    drawn,
    gpu_room,
    loads_of,
)
from toolkit.papers.hermes.tokens import generate, token_stages, token_timeline

MACHINE = profile("hermes-rtx4090")
SERVING = Serving("opt-30b", sampled_layers=2, sampled_tokens=7, sampled_prompt=6)
ALL = SYSTEMS | ABLATION
SPARSE = [name for name, system in ALL.items() if system.sparse]


def machine_of(system: str):
    return profile("hermes-5a100") if system == "tensorrt" else MACHINE


@pytest.mark.parametrize("system", SPARSE)
def test_every_active_neuron_is_computed_once(system):
    """On the GPU or on one DIMM, whatever is swapped and remapped; the draws themselves are the oracle."""
    serving = replace(SERVING, batch=3)
    loads = loads_of(MACHINE, serving, ALL[system])
    for name in NEURONS:
        counts = np.stack(list(drawn(serving, name)))[:, serving.sampled_prompt :]
        assert np.array_equal(loads[name].hot + loads[name].cold.sum(-1), (counts > 0).sum(-1))
        assert np.array_equal(loads[name].hot_products + loads[name].cold_products.sum(-1), counts.sum(-1))


@pytest.mark.parametrize("system", ALL)
def test_the_scheduler_ends_when_the_stages_end(system):
    """The vectorised sum of stages against steps on resources, one token."""
    machine, system, token = machine_of(system), ALL[system], 5
    made = token_stages(machine, SERVING, system)
    layers = max(len(stage.seconds) for stage in made)
    expected = 0.0
    for layer in range(layers):
        for stage in made:
            seconds = stage.seconds
            expected += seconds[min(layer, len(seconds) - 1), min(token, seconds.shape[1] - 1)]
    assert token_timeline(machine, SERVING, system, token).total_s == pytest.approx(expected)


def test_flexgen_by_hand():
    """Layers beyond the GPU's memory come over PCIe while earlier ones compute; attention and head come on top."""
    found = generate(MACHINE, SERVING, SYSTEMS["flexgen"])
    layer_gb = SERVING.nbytes / SERVING.shape.layers / GB
    resident = round(20 * (1 - SERVING.head_bytes / 20e9) / (layer_gb * SERVING.shape.layers) * SERVING.shape.layers)
    copied, computed = (SERVING.shape.layers - resident) * layer_gb / 45, resident * layer_gb / 936
    assert found.token_s == pytest.approx(copied + computed + found.parts["attention"] + found.parts["head"])
    assert found.prefill_s == pytest.approx((SERVING.nbytes - (20e9 - SERVING.head_bytes)) / 45e9)
    assert found.tokens_per_s == pytest.approx(128 / (found.prefill_s + 128 * found.token_s))


def test_the_parts_of_a_token_add_up_and_hermes_copies_nothing():
    for system in SYSTEMS:
        found = generate(machine_of(system), SERVING, SYSTEMS[system])
        assert found.token_s == pytest.approx(sum(found.parts.values()))
        assert (found.parts["copy"] > 0) == (SYSTEMS[system].cold == "pcie")


def test_swaps_keep_the_number_of_hot_neurons_and_fit_the_projections_shadow():
    loads = loads_of(MACHINE, SERVING, SYSTEMS["hermes"])
    shadow_bytes = SERVING.blocks[PROJECTION].unit_bytes / (936 * GB) * 45 * GB
    moved = sum(loads[name].swapped * SERVING.blocks[name].unit_bytes for name in NEURONS)
    assert 0 < moved.max() <= shadow_bytes
    assert gpu_room(MACHINE, SERVING).gpu_bytes > 0


def test_machines_that_are_too_small_are_refused():
    for machine, system, message in (
        (profile("hermes-5a100"), "hermes", "no near-data DIMMs"),
        (MACHINE, "tensorrt", "expected more GPUs"),
    ):
        with pytest.raises(UserError, match=message):
            generate(machine, SERVING, SYSTEMS[system])
