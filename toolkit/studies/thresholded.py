"""A model with thresholds on its activations: inputs of its FFNs and neurons that fire, measured once and kept."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float32
from torch import Tensor

from toolkit.cache import kept, kept_folder
from toolkit.models.ffn import decoder_ffns
from toolkit.predictors import Samples
from toolkit.sparsity import Magnitudes, Trace, record, thresholds_of
from toolkit.sparsity.changed import LOADING
from toolkit.studies.loaded import loaded, tokens_of, weights_key
from toolkit.studies.quality import EvaluationSettings

SAMPLED_WINDOWS = 2  # on which limits are chosen (of calibration text) and predictions are counted (of evaluation text)
TRACE = "trace.safetensors"


@dataclass(frozen=True)
class ThresholdedModel:
    """A model with thresholds on its activations, and the text that these and its predictors are fitted on."""

    model: str = "smollm2-135m"
    corpus: str = "wiki-slice"
    zeros: float = 0.8
    """Share of the outputs that each layer's threshold sets to zero; a model with thresholds of its own keeps them."""
    windows: int = 8
    """Windows of calibration text."""
    sequence_length: int = 512
    """Tokens a window, of calibration and evaluation."""
    criterion: str = "output"
    """The criterion of the thresholds: a key of `toolkit.sparsity.thresholds.CRITERIA`."""

    def text(self, windows: int | None = None) -> EvaluationSettings:
        """So much evaluation text, to measure the model's quality on."""
        return EvaluationSettings(self.model, self.corpus, self.sequence_length, windows)


def thresholds(setting: ThresholdedModel) -> Float32[Tensor, " layers"]:
    """The threshold of each layer, kept; those of the model itself, if it has any, and 0 if no zeros are asked for."""
    own = thresholds_of(loaded(setting.model)[0])
    if own is not None:
        return own
    if setting.zeros == 0:
        return torch.zeros(len(decoder_ffns(loaded(setting.model)[0])))
    return torch.tensor(_thresholds(setting)["threshold"].to_numpy(), dtype=torch.float32)


@kept("thresholds", without=LOADING, key=weights_key)
def _thresholds(setting: ThresholdedModel) -> pd.DataFrame:
    model, tokens = loaded(setting.model)[0], tokens_of(setting.model, setting.corpus, "calibration")
    sizes = Magnitudes.measure(model, tokens, setting.windows, setting.sequence_length, setting.criterion)
    return pd.DataFrame({"threshold": sizes.thresholds(setting.zeros).double()})


def samples(setting: ThresholdedModel, part: str) -> Samples:
    """The inputs of the thresholded model's FFNs over a part of the text.

    The thresholds are fitted on "training"; "limits" is the text behind it; "evaluation" is other text.
    """
    windows = setting.windows if part == "training" else SAMPLED_WINDOWS
    tokens = tokens_of(setting.model, setting.corpus, "evaluation" if part == "evaluation" else "calibration")
    if part == "limits":
        tokens = tokens[setting.windows * setting.sequence_length :]
    model, limits, length = loaded(setting.model)[0], thresholds(setting), setting.sequence_length
    return Samples.record(model, limits, tokens, windows, length, setting.criterion)


few_samples = cache(samples)
"""`samples`, cached in memory."""


@cache
def trace(setting: ThresholdedModel, windows: int) -> Trace:
    """The trace of the thresholded model over evaluation text, kept."""
    return Trace.load(_trace(setting, windows) / TRACE, setting.model)


@kept_folder("traces", without=LOADING, key=weights_key)
def _trace(folder: Path, setting: ThresholdedModel, windows: int) -> None:
    model, tokens = loaded(setting.model)[0], tokens_of(setting.model, setting.corpus, "evaluation")
    limits, length = thresholds(setting), setting.sequence_length
    record(model, setting.model, tokens, setting.corpus, limits, windows, length).save(folder / TRACE)
