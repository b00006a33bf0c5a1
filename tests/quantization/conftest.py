"""Matrices and statistics of their inputs, the same each time."""

import torch


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gram_of(seed, columns, dtype=torch.float64):
    inputs = random(seed, 3 * columns, columns, dtype=dtype)
    return inputs.T @ inputs
