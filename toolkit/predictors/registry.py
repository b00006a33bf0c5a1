"""All kinds of predictors, by name."""

from toolkit.predictors.few_bits import FewBits
from toolkit.predictors.foresight import Foresight
from toolkit.predictors.gate import Gate
from toolkit.predictors.layer_correlation import LayerCorrelation, StateAndParents
from toolkit.predictors.low_rank import LowRank
from toolkit.predictors.oracle import Oracle
from toolkit.predictors.predictor import Predictor
from toolkit.predictors.token_state import TokenState
from toolkit.predictors.weightless import All, CopyLast, Nothing

KINDS = (FewBits, LowRank, Gate, Oracle, All, CopyLast, Nothing, TokenState, LayerCorrelation, StateAndParents)

PREDICTORS: dict[str, type[Foresight]] = {kind.name: kind for kind in KINDS}
STORED = {name: kind for name, kind in PREDICTORS.items() if issubclass(kind, Predictor) and kind is not Oracle}
"""The kinds that a file can keep."""
