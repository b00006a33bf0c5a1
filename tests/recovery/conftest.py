"""Tiny random decoders to train."""

from tests.sparsity.conftest import _small, tiny, tokens  # noqa: F401
