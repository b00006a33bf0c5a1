"""Activations by the names of configurations, against transformers' own."""

import pytest
import torch
from transformers.activations import ACT2FN

from tests.pruning.conftest import _small, tiny  # noqa: F401
from toolkit.errors import UserError
from toolkit.kernels.neurons import ACTIVATIONS as IN_KERNELS
from toolkit.models.activation import ACTIVATIONS, activation, activation_name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers_and_map_zero_to_zero(name):
    x = torch.linspace(-4, 4, 41)
    assert torch.allclose(activation(name)(x), ACT2FN[name](x), atol=1e-6)
    assert activation(name)(torch.zeros(1)).item() == 0


def test_the_kernels_know_the_same_names():
    assert ACTIVATIONS.keys() == IN_KERNELS.keys()


def test_a_model_names_its_activation(tiny):  # noqa: F811
    assert [activation_name(tiny(family)) for family in ("llama", "opt", "gemma2")] == [
        "silu",
        "relu",
        "gelu_pytorch_tanh",
    ]
    model = tiny("llama")
    model.config.hidden_act = "mystery"
    with pytest.raises(UserError, match="unknown activation 'mystery'"):
        activation_name(model)
