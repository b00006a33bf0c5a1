"""Groups along and across neurons: what each axis quantises, and the errors of a tiny FFN."""

import torch

from tests.notebook_code import functions_of

NOTEBOOK = functions_of("corm/fig09")
AXES, RECORDS, decoded, quantise = NOTEBOOK.AXES, NOTEBOOK.RECORDS, NOTEBOOK.decoded, NOTEBOOK.quantise


def layer(seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(128, 64, generator=generator) * 0.02 for _ in range(3))


def test_errors_of_each_axis():
    errors = {
        axis: quantise([tuple(each.clone() for each in layer(seed)) for seed in (0, 1)], axis, 4) for axis in AXES
    }
    assert all(0.05 < error < 0.12 for of_axis in errors.values() for error in of_axis.values())
    for part, error in errors[RECORDS].items():  # 8 bits for scales cost little
        assert abs(error / errors["along the neuron"][part] - 1) < 0.02


def test_the_matrices_become_what_they_decode_to():
    matrices = layer(0)
    dense = [each.clone() for each in matrices]
    errors = quantise([matrices], "across neurons", 2)
    expected = decoded(tuple(dense), "across neurons", 2)
    for found, wanted, weight, error in zip(matrices, expected, dense, errors.values(), strict=True):
        assert torch.equal(found, wanted.float())
        assert abs(error - ((wanted - weight).norm() / weight.norm()).item()) < 1e-6
