"""A tiny decoder with its thresholds and samples, and a predictor of each kind for it."""

import pytest

from tests.pruning.conftest import _small, tiny, tokens  # noqa: F401
from toolkit.activations import Magnitudes
from toolkit.models.activation import activation_name
from toolkit.models.ffn import decoder_ffns
from toolkit.predictors import All, FewBits, Gate, LowRank, Nothing, Oracle, Samples, train

KINDS = {
    "all": lambda ffn, act, limit, _: All(limit, ffn.neurons, ffn.up.in_features),
    "nothing": lambda ffn, act, limit, _: Nothing(limit, ffn.neurons, ffn.up.in_features),
    "oracle": lambda ffn, act, limit, _: Oracle(limit, ffn, act),
    "gate": lambda ffn, act, limit, _: Gate.of(ffn, act, limit),
    "few_bits": lambda ffn, act, limit, _: FewBits.of(ffn, act, limit),
    "low_rank": lambda ffn, act, limit, trained: trained,
}


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

    def make(kind, model, limits, samples):
        act = activation_name(model)
        trained = train(samples, 4, epochs=1) if kind == LowRank.name else [None] * samples.layers
        parts = zip(decoder_ffns(model), limits.tolist(), trained, strict=True)
        return [KINDS[kind](ffn, act, limit, one) for ffn, limit, one in parts]

    return make
