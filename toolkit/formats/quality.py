"""How good a model is when its weights are pruned and stored in fewer bytes: quality and bits per weight in one table.

The packed form is decoded into the model before it is evaluated, so the bytes counted are those that give the quality.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Protocol

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from toolkit.cache import cached_table
from toolkit.errors import UserError, unknown
from toolkit.evaluation import paired_difference
from toolkit.evaluation.quality import evaluate
from toolkit.formats import encode
from toolkit.formats.scaled import Scaled
from toolkit.models import decoder_blocks, decoder_linears, fast_dtype, load_model
from toolkit.progress import progress
from toolkit.pruning import METHODS, Calibration, load_pruned
from toolkit.pruning.pruned import DENSE, is_followed, made_by, settings_of, weights_sha256
from toolkit.quantization.gptq import GPTQ
from toolkit.quantization.hqq import Groupwise
from toolkit.quantization.layerwise import Quantiser
from toolkit.quantization.quantised import load_quantised
from toolkit.quantization.rtn import RoundToNearest
from toolkit.quantization.spqr import SpQR
from toolkit.text import load_tokens

HALF_BITS = 16
WINDOW_NLL = "window nll"
LOG_DIFFERENCE = "difference of log-perplexity"


class Stored(Protocol):
    """A matrix in some form: its bytes, and the dense matrix it stands for."""

    nbytes: int

    def decode(self) -> Tensor:
        """The dense matrix."""
        ...


def _half(form: str, weight: Tensor) -> Stored:
    return encode(form, weight.half())


def _int8(form: str, weight: Tensor) -> Stored:
    return Scaled.encode(form, weight.half())


# how a decoder linear is stored; int8 has a scale a row, the others of few bits a scale and a zero point a group
FORMS: dict[str, Callable[[Tensor], Stored]] = {
    "fp16": partial(_half, "dense"),
    "fp16, endor": partial(_half, "endor"),
    "fp16, 2:4": partial(_half, "two_four"),
    "int8": partial(_int8, "dense"),
    "int8, endor": partial(_int8, "endor"),
    "int8, 2:4": partial(_int8, "two_four"),
    "int4, hqq": partial(Groupwise.encode, bits=4),
    "int3, hqq": partial(Groupwise.encode, bits=3),
    "int2, hqq": partial(Groupwise.encode, bits=2),
    "int4, rtn": RoundToNearest(4),
    "int3, rtn": RoundToNearest(3),
    "int2, rtn": RoundToNearest(2),
    "int3, rtn 16": RoundToNearest(3, 16),
    "int3, rtn 128": RoundToNearest(3, 128),
}
# how a dense model's decoder linears are quantised with calibration; groups of 64 but where a number says otherwise
CALIBRATED: dict[str, Quantiser] = {
    "int4, gptq": GPTQ(4),
    "int3, gptq": GPTQ(3),
    "int2, gptq": GPTQ(2),
    "int3, gptq 16": GPTQ(3, 16),
    "int3, gptq 128": GPTQ(3, 128),
    "int3, spqr 0 %": SpQR(0.0),  # the share of outliers; groups of 16
    "int3, spqr 0.5 %": SpQR(0.005),
    "int3, spqr 1 %": SpQR(0.01),
    "int3, spqr 2 %": SpQR(0.02),
    "int3, spqr 4 %": SpQR(0.04),
    "int3, spqr 1 % plain": SpQR(0.01, damping=0.01, reorder=False, search=False),
}
VALUE_BITS = {"fp16, endor": 16, "int8, endor": 8}  # forms whose bitmap the entropy limit is about


@dataclass(frozen=True)
class Variant:
    """A model made smaller: pruned as `load_pruned` does it, then its decoder linears stored in one of `FORMS`.

    A form of `CALIBRATED` is for a dense model. `sparsity` is the share of zeros asked for; a `pattern` decides it. The
    last two fields matter to calibrated methods and forms only.
    """

    form: str = "fp16"
    method: str = DENSE
    sparsity: float = 0.0
    pattern: str | None = None
    calibration_windows: int | None = None
    seed: int = 0

    def __post_init__(self):
        """Refuse a form that is not there, and one for dense models with a pruned one. Raises `UserError`."""
        if self.form not in FORMS and self.form not in CALIBRATED:
            raise unknown("form", self.form, FORMS | CALIBRATED)
        if self.form in CALIBRATED and self.method != DENSE:
            raise UserError(f"form {self.form!r} is for a dense model, and method is {self.method!r}; choose {DENSE!r}")

    @property
    def zeros_pattern(self) -> str:
        """How the zeros are laid out: "2:4" say, "50 %" without a pattern, "none" for a dense model."""
        return "none" if self.method == DENSE else self.pattern or f"{self.sparsity:.0%}".replace("%", " %")


@dataclass(frozen=True)
class Settings:
    """Which model, and what it is evaluated on: as in `evaluate`."""

    model: str
    corpus: str = "wiki-slice"
    sequence_length: int = 1024
    windows: int | None = None
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None


def compare_variants(variants: Sequence[Variant], settings: Settings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Quality and bytes of each variant, and the log-likelihoods of its windows. Kept: a second call reads them.

    The first table has one row a variant and metric. Columns: model, corpus, those of `Variant` (`pattern` is its
    `zeros_pattern`), zeros (share really there), bits_per_weight (of all decoder linears; embeddings and head are not
    counted), ratio (over 16 bits), entropy_bits (NaN for forms without a bitmap), those of `evaluate`, and evidence.
    The second table has one row a variant and window: those of `Variant`, window, and nll (mean negative
    log-likelihood a token, nats). Raises what `load_pruned`, `encode` and `evaluate` raise.
    """
    dense, tokenizer = load_model(settings.model, fast_dtype())
    tokens = load_tokens(settings.corpus, tokenizer, "evaluation")
    weights = weights_sha256(dense)
    del dense
    found = []
    for variant in variants:
        key = asdict(variant) | {"settings": asdict(settings), "weights_sha256": weights, "dtype": str(fast_dtype())}
        method = CALIBRATED.get(variant.form) or METHODS.get(variant.method)  # None for a dense model
        key |= {"method_settings": settings_of(method)}
        measure = partial(_measure, variant, settings, tokenizer, tokens)
        rows = cached_table("quality", key, made_by(__name__, method), measure, fresh=not is_followed(method))
        found.append(rows.assign(**asdict(variant) | {"pattern": variant.zeros_pattern}))
    return tables(found, settings)


def tables(found: Sequence[pd.DataFrame], settings: Settings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The two tables of `compare_variants`, from the rows of `measured` with the labels of each variant."""
    everything = pd.concat(found, ignore_index=True)
    of_windows = everything["metric"].eq(WINDOW_NLL)
    labels = [field.name for field in fields(Variant)]
    windows = everything[of_windows].rename(columns={"items": "window", "value": "nll"})
    first = ["model", "corpus", *labels, "zeros", "bits_per_weight", "ratio", "entropy_bits"]
    table = everything[~of_windows].assign(model=settings.model, corpus=settings.corpus)
    table = table[[*first, *(name for name in table if name not in first)]].assign(evidence="measured")
    return table.reset_index(drop=True), windows[[*labels, "window", "nll"]].reset_index(drop=True)


def paired_differences(windows: pd.DataFrame, column: str, first: str, second: str) -> pd.DataFrame:
    """Differences of log-perplexity between two values of a column, window by window, all other labels alike.

    `windows` is the second table of `compare_variants`. Columns: its labels (`column` holds "first − second"), metric,
    value (mean of first − second in nats a token; negative where the first is better), standard_error, items (windows),
    better_windows (how many of them the first wins). Raises `UserError` where nothing can be paired.
    """
    others = [name for name in windows if name not in (column, "window", "nll")]
    rows = []
    for labels, group in windows.groupby(others, sort=False, dropna=False):
        nll = {name: part.sort_values("window")["nll"].tolist() for name, part in group.groupby(column)}
        if first in nll and second in nll:
            mean, error = paired_difference(nll[first], nll[second])
            wins = sum(one < other for one, other in zip(nll[first], nll[second], strict=True))
            row = dict(zip(others, labels, strict=True)) | {column: f"{first} − {second}", "metric": LOG_DIFFERENCE}
            row |= {"value": mean, "standard_error": error, "items": len(nll[first]), "better_windows": wins}
            rows.append(row)
    if not rows:
        raise UserError(f"no variant has both {first!r} and {second!r} in column {column!r}; measure both")
    return pd.DataFrame(rows).assign(evidence="measured")


@torch.no_grad()
def store(model: nn.Module, form: str) -> dict[str, float]:
    """Give every decoder linear the weight that its stored form decodes to, in place; return what it takes.

    Keys: zeros (share of the decoded weights), bits_per_weight, ratio (over 16 bits), entropy_bits. Raises `UserError`
    for an unknown form, and what its encoder raises.
    """
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    nbytes, linears = 0, _linears(model)
    with progress(f"storing as {form}", len(linears), "matrices") as bar:
        for linear in linears:
            packed = FORMS[form](linear.weight.detach())
            linear.weight.copy_(packed.decode())
            nbytes += packed.nbytes
            bar.update()
    return size_of(model, nbytes, VALUE_BITS.get(form))


def size_of(model: nn.Module, nbytes: int, value_bits: int | None = None) -> dict[str, float]:
    """What `store` returns, for decoder linears that take so many bytes; `value_bits` are a bitmap's."""
    weights = [linear.weight for linear in _linears(model)]
    elements = sum(weight.numel() for weight in weights)
    share, bits = sum(int((weight == 0).sum()) for weight in weights) / elements, 8 * nbytes / elements
    limit = entropy_bits(share, value_bits) if value_bits else np.nan
    return {"zeros": share, "bits_per_weight": bits, "ratio": bits / HALF_BITS, "entropy_bits": limit}


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [linear for block in decoder_blocks(model) for linear in decoder_linears(block).values()]


def entropy_bits(sparsity: float, value_bits: int) -> float:
    """Bits a weight that no bitmap can go below where zeros fall at random: H(s) + (1 − s) · value_bits.

    H is the binary entropy: a code for the positions that is as short as can be, instead of one bit each.
    """
    if not 0 <= sparsity <= 1:
        raise UserError(f"sparsity {sparsity!r} is out of range; expected a share of zeros in [0, 1]")
    shares = [share for share in (sparsity, 1 - sparsity) if share > 0]
    return float(-sum(share * np.log2(share) for share in shares) + (1 - sparsity) * value_bits)


def pareto_front(size: pd.Series, cost: pd.Series) -> pd.Series:
    """Mark the points that no other point beats: none is at most as large and at most as costly, and better in one."""
    points = np.stack([size.to_numpy(float), cost.to_numpy(float)], axis=1)
    beaten = [bool(((points <= point).all(1) & (points < point).any(1)).any()) for point in points]
    return pd.Series(np.logical_not(beaten), index=size.index)


def _measure(variant: Variant, settings: Settings, tokenizer, tokens: Tensor) -> pd.DataFrame:
    calibration = Calibration(settings.corpus, variant.calibration_windows, settings.sequence_length, variant.seed)
    if variant.form in CALIBRATED:
        quantised = load_quantised(settings.model, CALIBRATED[variant.form], calibration, fast_dtype())
        size = size_of(quantised.model, sum(of.nbytes for of in quantised.statistics))
        return measured(quantised.model, size, settings, tokenizer, tokens)
    sparsity = variant.sparsity if variant.pattern is None else 0.5
    kept = {"calibration": calibration, "dtype": fast_dtype()}
    model, _, _ = load_pruned(settings.model, variant.method, sparsity, variant.pattern, **kept)
    return measured(model, store(model, variant.form), settings, tokenizer, tokens)


def measured(model: nn.Module, size: dict[str, float], settings: Settings, tokenizer, tokens: Tensor) -> pd.DataFrame:
    """A model evaluated: the rows of `evaluate` and one row a window, each with the size that `store` gave."""
    length, windows = settings.sequence_length, settings.windows
    table, lost = evaluate(model, tokenizer, tokens, settings.tasks, length, windows, settings.task_limit)
    by_window = {"metric": WINDOW_NLL, "value": lost.window_nll, "items": range(lost.windows)}
    return pd.concat([table, pd.DataFrame(by_window)], ignore_index=True).assign(**size)
