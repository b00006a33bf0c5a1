"""Predictors of active neurons: what to load before an FFN is computed (LLM in a flash, section 3.1).

samples = Samples.record(model, thresholds, tokens, windows=8)
predictors = with_limits(LowRank.train(samples, ranks=128), samples, kept=0.97)
with predicted(model, thresholds, predictors):
    perplexity(model, other_tokens)
"""

from toolkit.predictors.evaluation import predicted, quality
from toolkit.predictors.few_bits import FewBits
from toolkit.predictors.foresight import Context, Foresight, Stateless
from toolkit.predictors.gate import Gate
from toolkit.predictors.layer_correlation import LayerCorrelation, StateAndParents
from toolkit.predictors.limits import with_limits
from toolkit.predictors.low_rank import LowRank
from toolkit.predictors.oracle import Oracle
from toolkit.predictors.predictor import Predictor
from toolkit.predictors.predictors import Predictors
from toolkit.predictors.registry import PREDICTORS, STORED
from toolkit.predictors.samples import Samples
from toolkit.predictors.token_state import TokenState
from toolkit.predictors.weightless import All, CopyLast, Nothing

__all__ = [
    "PREDICTORS",
    "STORED",
    "All",
    "Context",
    "CopyLast",
    "FewBits",
    "Foresight",
    "Gate",
    "LayerCorrelation",
    "LowRank",
    "Nothing",
    "Oracle",
    "Predictor",
    "Predictors",
    "Samples",
    "StateAndParents",
    "Stateless",
    "TokenState",
    "predicted",
    "quality",
    "with_limits",
]
