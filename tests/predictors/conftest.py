"""A tiny decoder with its thresholds and samples, and predictors for it."""

import pytest

from tests.sparsity.conftest import _small, tiny, tokens  # noqa: F401
from toolkit.predictors import PREDICTORS, Samples
from toolkit.sparsity import Magnitudes


@pytest.fixture
def wide(tiny):  # noqa: F811 (pytest's way)
    """Make a tiny model whose FFNs torch's 4-bit product takes."""

    def make(family="llama"):
        sizes = {"intermediate_size": 48} if family == "llama" else {"ffn_dim": 48, "word_embed_proj_dim": 32}
        return tiny(family, hidden_size=32, **sizes).bfloat16()

    return make


@pytest.fixture
def setting(wide, tokens):  # noqa: F811
    """Make a model, thresholds and samples: `setting(family)`."""

    def make(family="llama", zeros=0.7):
        model = wide(family)
        limits = Magnitudes.measure(model, tokens, sequence_length=16).thresholds(zeros)
        return model, limits, Samples.record(model, limits, tokens, sequence_length=16)

    return make


@pytest.fixture
def predictors_of():
    """The predictors of a kind for all layers: `predictors_of(kind, model, limits, samples)`."""
    return lambda kind, model, limits, samples: PREDICTORS[kind].fit(model, limits.tolist(), samples)
