"""SpQR matrices of random contents are sound, whole and the same in both forms."""

import pytest
import torch

from toolkit.formats import QUANTISED
from toolkit.formats.spqr import SpQRMatrix, SpQRTransposed
from toolkit.formats.twins import random_spqr

SHAPE = (64, 320)


@pytest.mark.parametrize("form", QUANTISED.values())
@pytest.mark.parametrize("outliers", [0, 0.01, 0.3, 1])
def test_contents_are_sound_and_have_that_share_of_outliers(form, outliers):
    made = random_spqr(form, SHAPE, torch.bfloat16, outliers)
    made.check()
    found = len(made.outliers.entries()[0]) / made.decode().numel()
    assert found == pytest.approx(outliers, abs=5 * (outliers * (1 - outliers) / made.decode().numel()) ** 0.5 + 1e-3)
    assert 0.005 < float(made.decode().float().std()) < 0.2


def test_both_forms_of_a_seed_have_the_same_weights_and_another_seed_has_others():
    given = [(SpQRMatrix, 7), (SpQRTransposed, 7), (SpQRMatrix, 8)]
    first, second, other = (random_spqr(form, SHAPE, torch.float32, 0.05, seed) for form, seed in given)
    assert torch.equal(first.decode(), second.decode())
    assert not torch.equal(first.decode(), other.decode())
