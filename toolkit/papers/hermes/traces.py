"""Traces of Hermes's figures 3, 4 and 7: recorded from embedded models, and drawn with the paper's statistics.

Every table tells them apart by `trace`: "recorded" ones are measured on models other than the paper's, so they stand in
for them; "drawn" ones are modelled. The law of the drawn ones takes the statistics of figures 3 and 4 as its input.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from toolkit.activations import Trace, statistics
from toolkit.activations.synthetic import BetaLaw, Drift, draw
from toolkit.activations.trace import UNITS
from toolkit.cache import kept_folder
from toolkit.models.architectures import ARCHITECTURES
from toolkit.predictors import Context, Foresight, Samples, quality
from toolkit.predictors.layer_correlation import Parents, find_parents, load_parents, save_parents

FFN, ATTENTION, _ = UNITS
RECORDED, DRAWN = {"trace": "recorded", "evidence": "measured"}, {"trace": "drawn", "evidence": "modelled"}
LAW = BetaLaw(active=0.20, far=0.70, near=0.90)  # figures 3 and 4
HOT = 0.20  # of the neurons, the most used: what the paper calls hot
WORK = 0.80  # of the activations, which hot neurons make up
SURE = 0.90  # chance from which a neuron is foretold by one of the layer before
REPEATED = 50  # calls of a predictor that are timed
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


def hot_cold_table(trace: Trace, labels: dict) -> pd.DataFrame:
    """Rows "curve": the share of activations over that of neurons, in hundredths. Rows "quantity", means over layers.

    Quantities, in percent: neurons that are idle for a token, activations of the `HOT` neurons, and the neurons that
    make up `WORK` of the activations.
    """
    curve = statistics.hot_cold(trace, points=100)
    by_layer = [rows for _, rows in curve.groupby("layer")]
    needed = [np.interp(WORK, rows["activations"], rows["neurons"]) for rows in by_layer]
    done = [np.interp(HOT, rows["neurons"], rows["activations"]) for rows in by_layer]
    values = {
        "activation sparsity": statistics.sparsity(trace)["sparsity"],
        "activations of the hot neurons": done,
        "neurons of most activations": needed,
    }
    mean = curve.groupby(curve.groupby("layer").cumcount())[["neurons", "activations"]].mean()
    curve = mean.rename(columns={"neurons": "neuron_share", "activations": "activation_share"}).assign(row="curve")
    return pd.concat([curve, _quantities(values)], ignore_index=True).assign(**_about(trace, labels))


def similarity_table(trace: Trace, distances: Sequence[int], labels: dict) -> pd.DataFrame:
    """How many of a token's neurons a token some way before it used, too, in percent: means over layers.

    Rows by `distance`, with `chance`: what usage alone gives, if tokens knew nothing of each other.
    """
    means = statistics.overlap(trace, distances).groupby("distance")[["shared", "chance"]].mean() * 100
    rows = means.rename(columns={"shared": "value"}).reset_index()
    return rows.assign(row="similarity", quantity="neurons shared", unit="percent", **_about(trace, labels))


def correlation_table(trace: Trace, labels: dict) -> pd.DataFrame:
    """How well one neuron of the layer before foretells a neuron, for neurons that fire for less than half the tokens.

    Parents are found in the first half of the tokens of each sequence and tried in the second. Rows "pair" have
    `given`, the share of the parent's tokens for which the neuron fires, and `usage`, that of all tokens. Rows
    "quantity", in percent: the mean of both, and the pairs with `given` of `SURE` or more.
    """
    half = trace.tokens.shape[1] // 2
    active = [trace.active(layer) for layer in range(trace.layers)]
    parents = find_parents(one[:, :half].flatten(0, 1) for one in active)
    pairs = []
    for layer in range(1, trace.layers):
        before, after = (active[place][:, half:].flatten(0, 1).numpy() for place in (layer - 1, layer))
        parent = before[:, parents[layer].neurons[0]]
        given = (parent & after).sum(0) / np.maximum(1, parent.sum(0))
        usage = after.mean(0)
        rows = pd.DataFrame({"layer": layer, "neuron": np.arange(len(usage)), "given": given, "usage": usage})
        pairs.append(rows[(usage > 0) & (usage < 0.5) & parent.any(0)])
    pairs = pd.concat(pairs).assign(row="pair")
    values = {"fires with its parent": pairs["given"], "pairs that are sure": pairs["given"] >= SURE}
    quantities = _quantities(values).assign(chance=[100 * pairs["usage"].mean(), 100 * (pairs["usage"] >= SURE).mean()])
    return pd.concat([pairs, quantities], ignore_index=True).assign(**_about(trace, labels))


def quality_table(kinds: dict[str, Sequence[Foresight]], trace: Trace, prompt: int, labels: dict) -> pd.DataFrame:
    """What predictors say of a trace, a row a label: means over layers of `quality`, and their bytes in all layers."""
    samples = Samples.of(trace)
    rows = []
    for label, layers in kinds.items():
        table = quality(layers, samples, prompt)
        means = table[["active", "predicted", "accuracy", "recall", "precision"]].mean().to_dict()
        rows.append({"label": label, "nbytes": table["nbytes"].sum(), **means})
    return pd.DataFrame(rows).assign(**_about(trace, labels))


def layer_us(predictor: Foresight, context: Context, active: np.ndarray) -> float:
    """The median time in microseconds of a layer's prediction and observation."""
    took = []
    predictor.start([active])
    for _ in range(REPEATED):
        begin = time.perf_counter()
        predictor.predict(context)
        predictor.observe(active)
        took.append(time.perf_counter() - begin)
    return 1e6 * float(np.median(took))


def _quantities(values: dict[str, Iterable[float]]) -> pd.DataFrame:
    rows = [{"quantity": name, "value": 100 * float(np.mean(list(of)))} for name, of in values.items()]
    return pd.DataFrame(rows).assign(row="quantity", unit="percent")


def _about(trace: Trace, labels: dict) -> dict:
    return {"model": trace.model, "block": trace.unit} | labels
