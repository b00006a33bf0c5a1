"""What fewer neurons cost and save: perplexity and FFN bytes over the share of zeros, by the way to get them."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial

import pandas as pd
import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from toolkit import sources
from toolkit.activations import Magnitudes, thresholded, thresholds_of
from toolkit.activations.relu import fatrelu, gate_limits
from toolkit.activations.sensitivity import fisher_losses
from toolkit.activations.thresholds import watched
from toolkit.cache import cached_table
from toolkit.errors import unknown
from toolkit.evaluation import perplexity
from toolkit.models import MODELS, fast_dtype, load_model
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.predictors import FewBits, predicted
from toolkit.pruning.calibration import Calibration
from toolkit.pruning.pruned import weights_sha256
from toolkit.recovery.shares import LEVELS, check_range, shares_of
from toolkit.storage.direct import whole_blocks
from toolkit.studies.variants import EvaluationSettings
from toolkit.text import load_tokens

FITTED_ON = Calibration(windows=8, sequence_length=256)
HALF_BYTES = 2
RECOVERED, RECOVERED_RELU = "recovered by distillation", "ReLU for SiLU, recovered by distillation"


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
        """What zeros cost each layer, foretold."""
        return fisher_losses(self.model, self.sizes, self.windows, LEVELS)


@contextmanager
def _even(dense: Fitted, zeros: float) -> Iterator[None]:
    with thresholded(dense.model, dense.sizes.thresholds(zeros)):
        yield


@contextmanager
def _shared_out(dense: Fitted, zeros: float) -> Iterator[None]:
    check_range([zeros])
    (by_layer,) = shares_of(dense.losses, [zeros])
    with thresholded(dense.model, dense.sizes.thresholds(by_layer)):
        yield


@contextmanager
def _predicted(dense: Fitted, zeros: float) -> Iterator[None]:
    """What the predictor loads, counts: neurons below the threshold, too."""
    limits = dense.sizes.thresholds(zeros)
    with predicted(dense.model, torch.zeros_like(limits), FewBits.fit(dense.model, limits.tolist())):
        yield


@contextmanager
def _fatrelu(dense: Fitted, zeros: float) -> Iterator[None]:
    with fatrelu(dense.model, gate_limits(dense.model, dense.windows, zeros)):
        yield


# how a dense model gets zeros without training
WAYS = {
    "threshold": _even,
    "threshold, by sensitivity": _shared_out,
    "threshold, few-bit predictor": _predicted,
    "FATReLU for SiLU, untrained": _fatrelu,
}


def dense_model(settings: EvaluationSettings) -> tuple[nn.Module, Int64[Tensor, "windows tokens"], Int64[Tensor, " n"]]:
    """The dense model, the windows that thresholds are fitted on, and the evaluation tokens."""
    model, tokenizer = load_model(settings.model, fast_dtype())
    windows = FITTED_ON.draw(load_tokens(settings.corpus, tokenizer, "calibration"))
    return model, windows, load_tokens(settings.corpus, tokenizer, "evaluation")


def sparse_rows(settings: EvaluationSettings, ways: Sequence[str], sparsities: Sequence[float]) -> pd.DataFrame:
    """A row for the dense model, for each way and share of zeros, and for each recovered version. Kept in the cache.

    Columns: family, asked (share of zeros asked for), zeros (share on the evaluation text), perplexity, ffn_bytes (of
    the neurons that are active for a token), bits_per_weight (these bytes over all FFN weights), evidence. Raises
    `UserError` for an unknown way or model.
    """
    model, windows, tokens = dense_model(settings)
    dense = Fitted(model, windows)
    measure = partial(_row, settings=settings, tokens=tokens)
    rows = [measure("dense", 0.0, model, nullcontext)]
    for way in ways:
        if way not in WAYS:
            raise unknown("way to get zeros", way, WAYS)
        rows += [measure(way, zeros, model, partial(WAYS[way], dense, zeros)) for zeros in sparsities]
    for family, zeros, name in recovered(settings.model):
        rows.append(measure(family, zeros, load_model(name, fast_dtype())[0], nullcontext))
    found, weights = pd.DataFrame(rows), ffn_weights(model)
    whole = found["family"].eq("dense")
    bundles = sum(bundle_bytes(ffn) * ffn.neurons for ffn in decoder_ffns(model))
    nbytes = ((1 - found["zeros"]) * bundles).where(~whole, weights * HALF_BYTES)
    return found.assign(ffn_bytes=nbytes, bits_per_weight=8 * nbytes / weights, evidence="measured")


def recovered(model: str) -> list[tuple[str, float, str]]:
    """Family, share of zeros and name of a model's recovered versions, by family and share."""
    names = [re.fullmatch(rf"{re.escape(model)}-(?:(\w+)-)?sparse(\d+)", name) for name in MODELS]
    families = {None: RECOVERED, "relu": RECOVERED_RELU}
    return sorted((families[name[1]], int(name[2]) / 100, name[0]) for name in names if name)


def ffn_weights(model: nn.Module) -> int:
    """Weights of all FFNs."""
    linears = [linear for ffn in decoder_ffns(model) for linear in (ffn.gate, ffn.up, ffn.down) if linear is not None]
    return sum(linear.weight.numel() for linear in linears)


def bundle_bytes(ffn: FFN) -> int:
    """What a neuron takes on disk in fp16: its rows and its column, filled up to whole blocks."""
    return whole_blocks((2 if ffn.gate is None else 3) * ffn.down.out_features * HALF_BYTES)


def _row(
    family: str, asked: float, model: nn.Module, prepare: Callable, settings: EvaluationSettings, tokens: Tensor
) -> dict[str, object]:
    limits = thresholds_of(model)
    key = {"family": family, "asked": asked, "settings": asdict(settings), "dtype": str(fast_dtype())}
    key |= {"weights_sha256": weights_sha256(model), "thresholds": None if limits is None else limits.tolist()}
    measure = partial(_measured, model, prepare, tokens, settings)
    code = sources.dependencies(__name__, without=("toolkit.models.loading",))  # the key has the weights
    found = cached_table("sparse_curve", key, code, measure)
    return {"family": family, "asked": asked} | found.iloc[0].to_dict()


def _measured(model: nn.Module, prepare: Callable, tokens: Tensor, settings: EvaluationSettings) -> pd.DataFrame:
    zeros: list[float] = []
    see = lambda _, outputs: zeros.append((outputs == 0).double().mean().item())  # noqa: E731
    with prepare(), watched(model, see):
        lost = perplexity(model, tokens, settings.sequence_length, settings.windows)
    return pd.DataFrame([{"zeros": sum(zeros) / len(zeros), "perplexity": float(lost)}])
