"""Predictors of active neurons, which are loaded before an FFN is computed (LLM in a flash, section 3.1).

samples = Samples.record(model, thresholds, tokens, windows=8)
predictors = with_limits(LowRank.train(samples, ranks=128), samples, kept=0.97)
with predicted(model, thresholds, predictors):
    perplexity(model, other_tokens)
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.predictors.evaluation import predicted, prediction_quality
    from toolkit.predictors.files import PREDICTORS, STORED, load_predictors, save_predictors
    from toolkit.predictors.low_rank import LowRank
    from toolkit.predictors.next_layer import (
        NextLayer,
        OwnGate,
        expert_samples,
        gate_sizes,
        predict_experts,
        predict_neurons,
    )
    from toolkit.predictors.own_weights import FewBits, Gate, Oracle
    from toolkit.predictors.predictor import Context, Predictor, Scored, with_limits
    from toolkit.predictors.samples import Samples
    from toolkit.predictors.states import (
        LayerCorrelation,
        StateAndParents,
        TokenState,
        find_parents,
        parents_of,
        table_nbytes,
    )
    from toolkit.predictors.weightless import All, CopyLast, FromTrace, Nothing, Weightless
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "PREDICTORS",
    "STORED",
    "All",
    "Context",
    "CopyLast",
    "FewBits",
    "FromTrace",
    "Gate",
    "LayerCorrelation",
    "LowRank",
    "NextLayer",
    "Nothing",
    "Oracle",
    "OwnGate",
    "Predictor",
    "Samples",
    "Scored",
    "StateAndParents",
    "TokenState",
    "Weightless",
    "expert_samples",
    "find_parents",
    "gate_sizes",
    "load_predictors",
    "parents_of",
    "predict_experts",
    "predict_neurons",
    "predicted",
    "prediction_quality",
    "save_predictors",
    "table_nbytes",
    "with_limits",
]
