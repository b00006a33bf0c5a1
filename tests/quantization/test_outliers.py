"""How outliers are spread over rows: hand-worked counts and slow loops."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.notebook_code import functions_of
from toolkit.errors import UserError
from toolkit.kernels import csr
from toolkit.quantization import outliers as study
from toolkit.quantization.spqr import SpQR

fig3_3 = functions_of("spqr/fig3_3")


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outliers(counts, columns=64):
    """So many outliers in each row, in its first columns."""
    rows = np.repeat(np.arange(len(counts)), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    values = torch.ones(len(rows), dtype=torch.float16)
    return csr.encode("csr", (len(counts), columns), torch.from_numpy(rows), torch.from_numpy(places), values)


def test_densities_by_hand():
    counts = np.array([0] * 10 + [1] * 9 + [11])
    found = fig3_3.row_spread(counts, 50, np.random.default_rng(0))
    assert (found["outliers"], found["share_percent"]) == (20, pytest.approx(2))
    assert (found["density_median"], found["density_most"]) == (1, 22)
    assert found["densest_tenth_percent"] == pytest.approx(100 * 12 / 20)  # two of twenty rows
    assert found["heaviest_over_chance"] > 2
    assert fig3_3.densest_tenth(np.zeros(20, int)) == 0


def test_rows_are_counted_by_operation():
    matrices = {"self_attn.q_proj": outliers([3, 0, 2]), "self_attn.k_proj": outliers([0, 1])}
    quantised = SimpleNamespace(
        folders=("", ""), matrices=lambda _: {name: SimpleNamespace(outliers=of) for name, of in matrices.items()}
    )
    assert study.layer_densities(quantised, 1) == {"q_proj": [3, 0, 2], "k_proj": [0, 1]}
    assert [(layer, op) for layer, op, _ in study.outliers_of(quantised)] == [
        (layer, op) for layer in range(2) for op in ("q_proj", "k_proj")
    ]
    with pytest.raises(UserError, match="layer is 2; expected 0 to 1"):
        study.layer_densities(quantised, 2)


def test_the_error_of_the_worst_weights_is_that_of_a_loop():
    weight, inputs = random(1, 6, 20), random(2, 60, 20)
    gram = inputs.T @ inputs
    hessian = gram.double() + 0.1 * gram.diagonal().double().mean() * torch.eye(20, dtype=torch.float64)
    inverse = torch.linalg.inv(hessian)
    rounded = SpQR(outliers=0).round(weight).decode()
    errors = sorted(
        float(weight[i, j] - rounded[i, j]) ** 2 / float(inverse[j, j]) for i in range(6) for j in range(20)
    )
    expected = 100 * sum(errors[-12:]) / sum(errors)
    assert study.sensitive_share(weight, gram, 0.1) == pytest.approx(expected, rel=1e-4)
