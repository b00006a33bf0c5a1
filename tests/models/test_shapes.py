from itertools import product

import pytest
import torch

from toolkit.models.shapes import SHAPES, random_pruned, twin_shapes


def test_exact_sparsity_in_every_row():
    for shape, dtype in product([(0, 8), (3, 0), (1, 1), (130, 67), (2100, 40)], [torch.float32, torch.bfloat16]):
        for sparsity in (0, 0.3, 0.97, 1):
            weight = random_pruned(shape, sparsity, dtype)
            assert (weight.shape, weight.dtype) == (shape, dtype)
            assert ((weight == 0).sum(1) == round(sparsity * shape[1])).all()


def test_the_smallest_go():
    whole, pruned = random_pruned((70, 400), 0, torch.float32), random_pruned((70, 400), 0.5, torch.float32)
    kept = pruned != 0
    assert torch.equal(pruned[kept], whole[kept])
    largest_lost = whole.abs().masked_fill(kept, 0).amax(1)
    assert (largest_lost <= whole.abs().masked_fill(~kept, 9).amin(1) * 1.001).all()
    assert whole.std() == pytest.approx(0.02, rel=0.02)


def test_a_part_of_a_model_has_fewer_rows_of_the_same_length():
    assert twin_shapes("opt-66b") == SHAPES["opt-66b"]
    assert twin_shapes("opt-66b/8")["fc1"] == (4608, 9216)
    assert twin_shapes("llama2-70b/16")["k_proj"] == (64, 8192)
