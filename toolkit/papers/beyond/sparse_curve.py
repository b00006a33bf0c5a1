"""Ways to get zeros among the FFN outputs of a dense model without training."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from toolkit.errors import unknown
from toolkit.predictors import FewBits, predicted
from toolkit.sparsity import Magnitudes, thresholded
from toolkit.sparsity.calibration import Calibration
from toolkit.sparsity.shares import LEVELS, check_range, fisher_losses, shares_of
from toolkit.sparsity.thresholds import fatrelu, gate_limits, watched
from toolkit.studies.loaded import loaded, tokens_of
from toolkit.studies.quality import Alteration, EvaluationSettings

FITTED_ON = Calibration(windows=8, sequence_length=256)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A dense model and the windows that thresholds are fitted on; what several ways need is measured once."""

    model: nn.Module
    windows: Int64[Tensor, "windows tokens"]

    @cached_property
    def sizes(self) -> Magnitudes:
        """Magnitudes of the neurons' outputs."""
        return Magnitudes.measure(self.model, self.windows.flatten(), *self.windows.shape)

    @cached_property
    def losses(self) -> Float64[Tensor, "layers levels"]:
        """The predicted cost of zeros in each layer."""
        return fisher_losses(self.model, self.sizes, self.windows, LEVELS)


@lru_cache(maxsize=1)
def fitted(model: nn.Module, name: str, corpus: str) -> Fitted:
    """A dense model, which `loaded(name)` gave, and the first calibration windows of a text."""
    return Fitted(model, FITTED_ON.draw(tokens_of(name, corpus, "calibration")))


def _even(dense: Fitted, zeros: float) -> AbstractContextManager:
    return thresholded(dense.model, dense.sizes.thresholds(zeros))


def _shared_out(dense: Fitted, zeros: float) -> AbstractContextManager:
    check_range([zeros])
    (by_layer,) = shares_of(dense.losses, [zeros])
    return thresholded(dense.model, dense.sizes.thresholds(by_layer))


def _predicted(dense: Fitted, zeros: float) -> AbstractContextManager:
    """The neurons that the predictor loads count, those below the threshold, too."""
    limits = dense.sizes.thresholds(zeros)
    return predicted(dense.model, torch.zeros_like(limits), FewBits.fit(dense.model, limits.tolist()))


def _fatrelu(dense: Fitted, zeros: float) -> AbstractContextManager:
    return fatrelu(dense.model, gate_limits(dense.model, dense.windows, zeros))


# how a dense model gets zeros without training
ZEROS_BY: dict[str, Callable[[Fitted, float], AbstractContextManager]] = {
    "threshold": _even,
    "threshold, by sensitivity": _shared_out,
    "threshold, few-bit predictor": _predicted,
    "FATReLU for SiLU, untrained": _fatrelu,
}


@dataclass(frozen=True)
class Zeros(Alteration):
    """A share of the FFN outputs is zero, by a key of `ZEROS_BY`; without a way the model's own zeros are counted.

    Raises `UserError` for an unknown way.
    """

    way: str | None = None
    share: float = 0.0

    def __post_init__(self):
        """Refuse a way that is not there."""
        if self.way and self.way not in ZEROS_BY:
            raise unknown("way to get zeros", self.way, ZEROS_BY)

    @contextmanager
    def change(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """The fact is zeros: the share on the evaluation text."""
        model, facts, shares = loaded(settings.model)[0], dict[str, float | str](), list[float]()
        way: AbstractContextManager = nullcontext()
        if self.way:
            way = ZEROS_BY[self.way](fitted(model, settings.model, settings.corpus), self.share)
        with way, watched(model, lambda _, outputs: shares.append((outputs == 0).double().mean().item())):
            yield facts
        facts["zeros"] = sum(shares) / len(shares)
