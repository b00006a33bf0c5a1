"""Traces of Hermes's figures 3, 4 and 7: recorded from embedded models, and drawn with the paper's statistics.

Every table tells them apart by `trace`: "recorded" ones are measured on models other than the paper's, so they stand in
for them; "drawn" ones are modelled. The law of the drawn ones takes the statistics of figures 3 and 4 as its input.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from toolkit.activations import Trace
from toolkit.activations.synthetic import BetaLaw, Drift, draw
from toolkit.activations.trace import UNITS
from toolkit.cache import kept_folder
from toolkit.models.architectures import ARCHITECTURES
from toolkit.predictors.layer_correlation import Parents, find_parents, load_parents, save_parents

FFN, ATTENTION, _ = UNITS
RECORDED, DRAWN = {"trace": "recorded", "evidence": "measured"}, {"trace": "drawn", "evidence": "modelled"}
LAW = BetaLaw(active=0.20, far=0.70, near=0.90)  # figures 3 and 4
HOT = 0.20  # of the neurons
PARENTS = "parents.safetensors"


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


def drawn_parents(drawing: Drawing, calibration: int) -> list[Parents | None]:
    """The parents found in so many other tokens of the same law and ranks; kept."""
    longer = replace(drawing, tokens=drawing.tokens + calibration)
    return load_parents(_drawn_parents(longer, drawing.tokens) / PARENTS, drawing.model)


@kept_folder("drawn_parents")
def _drawn_parents(folder: Path, drawing: Drawing, first: int) -> None:
    trace = drawing.trace()
    found = find_parents(trace.active(layer)[0, first:] for layer in range(trace.layers))
    save_parents(folder / PARENTS, drawing.model, found)


def percentages(values: dict[str, Iterable[float]]) -> pd.DataFrame:
    """A row "quantity" for each name: the mean of its values, which are shares, in percent."""
    rows = [{"quantity": name, "value": 100 * float(np.mean(list(shares)))} for name, shares in values.items()]
    return pd.DataFrame(rows).assign(row="quantity", unit="percent")


def about(trace: Trace, labels: dict) -> dict:
    """The columns model and block of a trace's rows, and its labels."""
    return {"model": trace.model, "block": trace.unit} | labels
