"""Neurons cut where |act(gate)| does not exceed a threshold θ: how many, and at what price. Dense models and mixtures.

This is CORM's criterion (section 3): the activation function's value alone decides, and one θ holds for all layers. An
activation takes the place of the model's own, so experts that a token does not use are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from toolkit.activations.thresholds import run_decoder
from toolkit.cache import kept
from toolkit.errors import UserError, unknown
from toolkit.models.activation import activation, activation_name, replaced
from toolkit.models.blocks import decoder_blocks
from toolkit.pruning.calibration import cut_windows
from toolkit.studies.thresholded import LOADING, loaded, weights_key
from toolkit.text import load_tokens

SILU_MINIMUM = -0.27846  # of x · sigmoid(x), at x = −1.2785
LOBES = {"both": 0, "negative": -1, "positive": 1}  # the sign of the values that a threshold cuts


@dataclass(frozen=True)
class GateSetting:
    """A model and the evaluation text that its gates are watched on."""

    model: str = "smollm2-135m"
    corpus: str = "wiki-slice"
    windows: int = 2
    sequence_length: int = 1024


class CutActivation(nn.Module):
    """An activation whose values up to θ in magnitude are zero, and the count of values up to each of `levels`.

    With a `lobe` other than "both", values of the other sign are neither cut nor counted.
    """

    def __init__(self, name: str, theta: float, levels: Sequence[float] = (), lobe: str = "both"):
        super().__init__()
        self.function, self.theta, self.levels = activation(name), theta, torch.tensor(levels)
        self.sign = LOBES[lobe]
        self.counts, self.total = torch.zeros(len(levels), dtype=torch.int64), 0

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """act(x), or 0."""
        values = self.function(x)
        sizes = values.abs()
        if self.sign:
            sizes = sizes.masked_fill(self.sign * values < 0, torch.inf)
        if len(self.levels):
            bins = torch.bucketize(sizes.float().flatten(), self.levels)
            self.counts += bins.bincount(minlength=len(self.levels) + 1)[:-1].cumsum(0)
            self.total += values.numel()
        return values.masked_fill(sizes <= self.theta, 0) if self.theta else values


def ignored_neurons(setting: GateSetting, thetas: Sequence[float]) -> pd.DataFrame:
    """The share of neurons up to each θ in each layer, with nothing cut. Columns: model, layer, theta, ignored.

    Raises `UserError` for a threshold below 0.
    """
    return _ignored(setting, _checked(thetas)).assign(model=setting.model)


def cut_quality(setting: GateSetting, thetas: Sequence[float], lobe: str = "both") -> pd.DataFrame:
    """The model with each θ in all its layers; it cuts values of one sign only, if `lobe` names one.

    Columns: model, lobe, theta, ignored (mean share of neurons, with the cuts in place), perplexity, standard_error,
    next_token_accuracy (share of next tokens that the model ranks first), relative and relative_accuracy (over θ = 0).
    Raises as `ignored_neurons` does, and for an unknown lobe.
    """
    if lobe not in LOBES:
        raise unknown("lobe", lobe, LOBES)
    rows = pd.concat([_quality(setting, theta, lobe) for theta in _checked(sorted({0.0, *thetas}))], ignore_index=True)
    uncut = rows.iloc[0]
    relative = {f"relative{end}": rows[name] / uncut[name] for name, end in RELATIVE.items()}
    return rows.assign(model=setting.model, lobe=lobe, **relative)


RELATIVE = {"perplexity": "", "next_token_accuracy": "_accuracy"}


def _checked(thetas: Sequence[float]) -> tuple[float, ...]:
    if wrong := [theta for theta in thetas if not 0 <= theta < float("inf")]:
        raise UserError(f"threshold {wrong[0]}: expected a number of at least 0")
    return tuple(thetas)


@kept("gate_thresholds", without=LOADING, key=weights_key)
def _ignored(setting: GateSetting, thetas: tuple[float, ...]) -> pd.DataFrame:
    model, windows = loaded(setting.model)[0], _windows(setting)
    cuts = _cuts(model, 0.0, sorted(thetas))
    with replaced(model, cuts), torch.no_grad():
        for window in windows:
            run_decoder(model, window)
    rows = [
        {"layer": layer, "theta": theta, "ignored": count / cut.total}
        for layer, cut in enumerate(cuts)
        for theta, count in zip(sorted(thetas), cut.counts.tolist(), strict=True)
    ]
    return pd.DataFrame(rows)


@kept("gate_thresholds", without=LOADING, key=weights_key)
def _quality(setting: GateSetting, theta: float, lobe: str) -> pd.DataFrame:
    model, windows = loaded(setting.model)[0], _windows(setting)
    cuts, losses, right = _cuts(model, theta, [theta], lobe), [], []
    with replaced(model, cuts), torch.inference_mode():
        for window in windows:
            logits = model(window[None], use_cache=False).logits[0, :-1]
            losses.append(functional.cross_entropy(logits.float(), window[1:]).double())
            right.append((logits.argmax(-1) == window[1:]).double().mean())
    mean = torch.stack(losses)
    spread = mean.std().item() / len(mean) ** 0.5 if len(mean) > 1 else float("nan")
    perplexity = mean.mean().exp().item()
    ignored = sum(int(cut.counts[0]) for cut in cuts) / sum(cut.total for cut in cuts)
    row = {"theta": theta, "ignored": ignored, "perplexity": perplexity, "standard_error": perplexity * spread}
    return pd.DataFrame([row | {"next_token_accuracy": torch.stack(right).mean().item()}])


def _windows(setting: GateSetting) -> Tensor:
    tokens = load_tokens(setting.corpus, loaded(setting.model)[1], "evaluation")
    return cut_windows(tokens, setting.windows, setting.sequence_length)


def _cuts(model: nn.Module, theta: float, levels: Sequence[float], lobe: str = "both") -> list[CutActivation]:
    name = activation_name(model)
    return [CutActivation(name, theta, levels, lobe) for _ in decoder_blocks(model)]
