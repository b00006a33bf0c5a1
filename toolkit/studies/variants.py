"""How good a model is when its weights are pruned and stored in fewer bytes: quality and bits per weight in one table.

The packed form is decoded into the model before it is evaluated, so the bytes counted are those that give the quality.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

import numpy as np
import pandas as pd
from torch import Tensor, nn

from toolkit.cache import cached_table
from toolkit.errors import UserError, unknown
from toolkit.evaluation import paired_difference
from toolkit.evaluation.quality import evaluate
from toolkit.models import fast_dtype, load_model
from toolkit.pruning import METHODS, Calibration, load_pruned
from toolkit.pruning.pruned import DENSE, is_followed, made_by, settings_of, weights_sha256
from toolkit.quantization.quantised import load_quantised
from toolkit.studies import mixtures
from toolkit.studies.forms import CALIBRATED, FORMS, MIXED, size_of, store
from toolkit.text import load_tokens

WINDOW_NLL = "window nll"
LOG_DIFFERENCE = "difference of log-perplexity"
FEW_BITS, FEW_BITS_CALIBRATED = "fewer bits, no pruning", "fewer bits, calibrated"  # families of dense models


@dataclass(frozen=True)
class ModelVariant:
    """A model made smaller: pruned as `load_pruned` does it, then its decoder linears stored in a form.

    `form` is a name in `FORMS`, in `CALIBRATED`, which is for dense models, or of llama.cpp (`mixtures.form_of`).
    `sparsity` is the share of zeros asked for; a `pattern` decides it. The last two fields matter to calibrated methods
    and forms only.
    """

    form: str = "fp16"
    method: str = DENSE
    sparsity: float = 0.0
    pattern: str | None = None
    calibration_windows: int | None = None
    seed: int = 0

    def __post_init__(self):
        """Refuse a form that is not there, and one for dense models with a pruned one. Raises `UserError`."""
        if self.form not in (known := FORMS | CALIBRATED | MIXED):
            raise unknown("form", self.form, known)
        if self.form in CALIBRATED and self.method != DENSE:
            raise UserError(f"form {self.form!r} is for a dense model, and method is {self.method!r}; choose {DENSE!r}")

    @property
    def zeros_pattern(self) -> str:
        """How the zeros are laid out: "2:4" say, "50 %" without a pattern, "none" for a dense model."""
        return "none" if self.method == DENSE else self.pattern or f"{self.sparsity:.0%}".replace("%", " %")


@dataclass(frozen=True)
class EvaluationSettings:
    """Which model, and what it is evaluated on: as in `evaluate`."""

    model: str
    corpus: str = "wiki-slice"
    sequence_length: int = 1024
    windows: int | None = None
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None


def compare_variants(
    variants: Sequence[ModelVariant], settings: EvaluationSettings
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Quality and bytes of each variant, and the log-likelihoods of its windows. Kept: a second call reads them.

    The first table has one row a variant and metric. Columns: model, corpus, those of `ModelVariant` (`pattern` is its
    `zeros_pattern`), zeros (share really there), bits_per_weight (of all decoder linears; embeddings and head are not
    counted), ratio (over 16 bits), entropy_bits (NaN for forms without a bitmap), those of `evaluate`, evidence, and
    with forms of llama.cpp types (`mixtures.type_shares`).
    The second table has one row a variant and window: those of `ModelVariant`, window, and nll (mean negative
    log-likelihood a token, nats). Raises what `load_pruned`, `encode` and `evaluate` raise.
    """
    dense, tokenizer = load_model(settings.model, fast_dtype())
    tokens = load_tokens(settings.corpus, tokenizer, "evaluation")
    weights = weights_sha256(dense)
    del dense
    tables = []
    for variant in variants:
        key = asdict(variant) | {"settings": asdict(settings), "weights_sha256": weights, "dtype": str(fast_dtype())}
        method = CALIBRATED.get(variant.form) or METHODS.get(variant.method)  # None for a dense model
        key |= {"method_settings": settings_of(method)}
        without = ["toolkit.studies.mixtures"]
        if variant.form in MIXED:
            key |= mixtures.LLAMA_CPP
            without = []
        code, measure = made_by(__name__, method, without), partial(_measure, variant, settings, tokenizer, tokens)
        rows = cached_table("quality", key, code, measure, fresh=not is_followed(method))
        tables.append(rows.assign(**asdict(variant) | {"pattern": variant.zeros_pattern}))
    return _split(pd.concat(tables, ignore_index=True), settings)


def of_second_model(
    variants: Sequence[ModelVariant], settings: EvaluationSettings, model: str, windows: int
) -> pd.DataFrame:
    """The perplexity of the same variants of another model, calibrated and evaluated on so many windows.

    The first table of `compare_variants`, and the column relative: the perplexity over that of the first variant. The
    table is empty if the model is "none". Raises what `compare_variants` raises.
    """
    if model == "none":
        return pd.DataFrame()
    fewer = [replace(each, calibration_windows=windows if each.calibration_windows else None) for each in variants]
    table, _ = compare_variants(fewer, replace(settings, model=model, windows=windows, tasks=(), task_limit=None))
    return table.assign(relative=table["value"] / table["value"].iloc[0])


def _split(rows: pd.DataFrame, settings: EvaluationSettings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The two tables of `compare_variants`, from the rows of `_measure` with the labels of each variant."""
    of_windows = rows["metric"].eq(WINDOW_NLL)
    labels = [field.name for field in fields(ModelVariant)]
    windows = rows[of_windows].rename(columns={"items": "window", "value": "nll"})
    first = ["model", "corpus", *labels, "zeros", "bits_per_weight", "ratio", "entropy_bits"]
    table = rows[~of_windows].assign(model=settings.model, corpus=settings.corpus)
    table = table[[*first, *(name for name in table if name not in first)]].assign(evidence="measured")
    return table.reset_index(drop=True), windows[[*labels, "window", "nll"]].reset_index(drop=True)


def few_bits_variants(forms: Sequence[str], windows: int | None, seed: int) -> list[ModelVariant]:
    """A dense model in 16 bits and in each form (names in `FORMS`, or in `CALIBRATED` with so many windows)."""
    calibration = {"calibration_windows": windows, "seed": seed}
    return [ModelVariant(form, **calibration if form in CALIBRATED else {}) for form in ("fp16", *forms)]


def by_variant(table: pd.DataFrame) -> pd.DataFrame:
    """One row a variant, in order, of the long table that `compare_variants` gives.

    Columns: family (what its points are drawn as), form, method, pattern, zeros, bits_per_weight, ratio, entropy_bits,
    perplexity, accuracy (mean over the tasks), chance (the same mean of guessing), accuracy_error (its standard error,
    tasks taken as independent), on_front (no other variant has both fewer bits and a lower perplexity).
    """
    labels = ["form", "method", "pattern", "zeros", "bits_per_weight", "ratio", "entropy_bits"]
    rows = []
    for key, group in table.groupby(labels, sort=False, dropna=False):
        tasks = group[group["metric"].ne("perplexity")]
        row = dict(zip(labels, key, strict=True))
        row["perplexity"] = group.loc[group["metric"].eq("perplexity"), "value"].item()
        row |= {"accuracy": tasks["value"].mean(), "chance": tasks["chance"].mean()}
        row["accuracy_error"] = np.sqrt((tasks["standard_error"] ** 2).sum()) / len(tasks) if len(tasks) else np.nan
        rows.append({"family": _family(row)} | row)
    table = pd.DataFrame(rows)
    return table.assign(on_front=pareto_front(table["bits_per_weight"], table["perplexity"]))


def _family(row: dict) -> str:
    if row["method"] == DENSE:
        return FEW_BITS_CALIBRATED if row["form"] in CALIBRATED else FEW_BITS
    return f"{row['method']}, {row['form'].split(',')[0]} values"


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


def pareto_front(size: pd.Series, cost: pd.Series) -> pd.Series:
    """Mark the points that no other point beats: none is at most as large and at most as costly, and better in one."""
    points = np.stack([size.to_numpy(float), cost.to_numpy(float)], axis=1)
    beaten = [bool(((points <= point).all(1) & (points < point).any(1)).any()) for point in points]
    return pd.Series(np.logical_not(beaten), index=size.index)


def _measure(variant: ModelVariant, settings: EvaluationSettings, tokenizer, tokens: Tensor) -> pd.DataFrame:
    calibration = Calibration(settings.corpus, variant.calibration_windows, settings.sequence_length, variant.seed)
    if variant.form in CALIBRATED:
        quantised = load_quantised(settings.model, CALIBRATED[variant.form], calibration, fast_dtype())
        size = size_of(quantised.model, sum(of.nbytes for of in quantised.statistics))
        return _evaluated(quantised.model, size, settings, tokenizer, tokens)
    sparsity = variant.sparsity if variant.pattern is None else 0.5
    model, _, _ = load_pruned(
        settings.model, variant.method, sparsity, variant.pattern, calibration=calibration, dtype=fast_dtype()
    )
    types = {"types": mixtures.type_shares(model, MIXED[variant.form])} if variant.form in MIXED else {}
    return _evaluated(model, store(model, variant.form) | types, settings, tokenizer, tokens)


def _evaluated(
    model: nn.Module, size: dict[str, object], settings: EvaluationSettings, tokenizer, tokens: Tensor
) -> pd.DataFrame:
    """The rows of `evaluate` and one row a window, each with the size that `store` gave."""
    length, windows = settings.sequence_length, settings.windows
    table, lost = evaluate(model, tokenizer, tokens, settings.tasks, length, windows, settings.task_limit)
    by_window = {"metric": WINDOW_NLL, "value": lost.window_nll, "items": range(lost.windows)}
    return pd.concat([table, pd.DataFrame(by_window)], ignore_index=True).assign(**size)
