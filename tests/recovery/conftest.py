"""Tiny random decoders to train."""

from tests.pruning.conftest import _small, tiny, tokens  # noqa: F401
