"""Traces of Hermes's figures 3, 4 and 7: recorded from embedded models, and drawn with the paper's statistics.

Every table tells them apart by `trace`: "recorded" ones are measured on models other than the paper's, so they stand in
for them; "drawn" ones are modelled. The law of the drawn ones takes the statistics of figures 3 and 4 as its input.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from toolkit.models.architectures import ARCHITECTURES
from toolkit.sparsity import Trace
from toolkit.sparsity.synthetic import BetaLaw, Drift, draw
from toolkit.sparsity.trace import UNITS

FFN, ATTENTION, _ = UNITS
RECORDED, DRAWN = {"trace": "recorded", "evidence": "measured"}, {"trace": "drawn", "evidence": "modelled"}
LAW = BetaLaw(active=0.20, far=0.70, near=0.90)  # figures 3 and 4
HOT = 0.20  # of the neurons


@dataclass(frozen=True)
class Drawing:
    """How a model's traces are drawn: Hermes's statistics (figures 3, 4) unless it says otherwise.

    `copied` is the chance with which a neuron does what its parent does; the paper does not give it. `drift` is the
    share of the hot neurons that change behind the `prompt` (section III-B has 52 %).
    """

    model: str = "llama2-13b"
    layers: int = 8
    tokens: int = 256
    prompt: int = 128
    law: BetaLaw = LAW
    copied: float = 0.5
    drift: float = 0.0
    seed: int = 0

    def trace(self, unit: str = FFN) -> Trace:
        """The trace of the FFN neurons, or of the attention neurons: the inputs of Q, K and V."""
        shape = ARCHITECTURES[self.model]
        neurons = shape.hidden if unit == ATTENTION else shape.ffn
        drift = Drift(self.drift, HOT, self.prompt)
        return draw(self.model, [self.law] * self.layers, neurons, self.tokens, self.seed, self.copied, drift, unit)


def percentages(values: dict[str, Iterable[float]]) -> pd.DataFrame:
    """A row "quantity" for each name: the mean of its values, which are shares, in percent."""
    rows = [{"quantity": name, "value": 100 * float(np.mean(list(shares)))} for name, shares in values.items()]
    return pd.DataFrame(rows).assign(row="quantity", unit="percent")


def about(trace: Trace, labels: dict) -> dict:
    """The columns model and block of a trace's rows, and its labels."""
    return {"model": trace.model, "block": trace.unit} | labels
