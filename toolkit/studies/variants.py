"""How good a model is when its weights are pruned and stored in fewer bytes: quality and bits per weight in one table.

The packed form is decoded into the model before it is evaluated, so the bytes counted are those that give the quality.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np
import pandas as pd

from toolkit import sources
from toolkit.errors import UserError, unknown
from toolkit.sparsity import METHODS, Calibration
from toolkit.sparsity.changed import DENSE, change_loaded, is_followed, made_by, settings_of
from toolkit.sparsity.grams import head_gram
from toolkit.sparsity.layerwise import Pruning
from toolkit.studies import mixtures
from toolkit.studies.forms import (
    CALIBRATED,
    FORMS,
    HEAD_TOO,
    MIXED,
    SPQR,
    WEIGHTED,
    linears,
    own_head,
    size_of,
    store,
    store_head,
)
from toolkit.studies.loaded import loaded
from toolkit.studies.quality import WINDOW_NLL, Alteration, EvaluationSettings, quality, restored

SECOND_PERPLEXITY = "perplexity, second model"  # a metric
FEW_BITS, FEW_BITS_CALIBRATED = "fewer bits, no pruning", "fewer bits, calibrated"  # families of dense models


@dataclass(frozen=True)
class ModelVariant(Alteration):
    """A model made smaller: pruned as `load_pruned` does it, then its decoder linears stored in a form.

    `form` is a name in `FORMS`, in `CALIBRATED`, which is for dense models, or of llama.cpp (`mixtures.form_of`), those
    with an importance matrix for dense models; with `HEAD_TOO` behind it the output head is stored, too, and its
    weights count.
    `sparsity` is the share of zeros asked for; a `pattern` decides it. The last three fields matter to calibrated
    methods and forms only; without a `calibration_corpus` they see the corpus of the evaluation. It may name several,
    as `Calibration` has them.
    """

    facts_at_once: ClassVar[bool] = True

    form: str = "fp16"
    method: str = DENSE
    sparsity: float = 0.0
    pattern: str | None = None
    calibration_windows: int | None = None
    seed: int = 0
    calibration_corpus: str | None = None

    def __post_init__(self):
        """Refuse a form that is not there, and one for dense models with a pruned one. Raises `UserError`."""
        if self.linear_form not in (known := FORMS | CALIBRATED | MIXED | WEIGHTED):
            raise unknown("form", self.form, known)
        if self.packs_head and self.head_form not in (known := FORMS | SPQR):
            raise unknown("form of a head", self.head_form, known)
        if self.linear_form in CALIBRATED | WEIGHTED and self.method != DENSE:
            raise UserError(f"form {self.form!r} is for a dense model, and method is {self.method!r}; choose {DENSE!r}")

    @property
    def linear_form(self) -> str:
        """The form of the decoder linears."""
        return self.form.removesuffix(HEAD_TOO)

    @property
    def packs_head(self) -> bool:
        """Whether the head has a form, too."""
        return self.form.endswith(HEAD_TOO)

    @property
    def head_form(self) -> str:
        """The form of the head, which is not pruned."""
        return "int8" if self.form.startswith("int8") else self.linear_form

    @property
    def zeros_pattern(self) -> str:
        """How the zeros are laid out: "2:4" say, "50 %" without a pattern, "none" for a dense model."""
        return "none" if self.method == DENSE else self.pattern or f"{self.sparsity:.0%}".replace("%", " %")

    @property
    def labels(self) -> dict[str, object]:
        """The columns that identify the variant: its fields; `pattern` is `zeros_pattern`.

        `calibration_corpus` is among them if it is given.
        """
        fields = asdict(self) | {"pattern": self.zeros_pattern}
        if self.calibration_corpus is None:
            del fields["calibration_corpus"]
        return fields

    @contextmanager
    def change(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """Prune and store the decoder linears. Facts are those of `size_of`, and the types of llama.cpp's forms.

        Raises what `change_loaded` and `store` raise.
        """
        model = loaded(settings.model)[0]
        weights = [linear.weight for linear in linears(model)]
        mixture = (MIXED | WEIGHTED).get(self.form)
        types = {"types": mixtures.type_shares(model, mixture, self.form in WEIGHTED)} if mixture else {}
        with restored(weights), own_head(model) if self.packs_head else nullcontext():
            nbytes = self._store_linears(settings)
            if self.packs_head:
                nbytes += self._store_head(settings)
                weights = [*weights, model.get_output_embeddings().weight]
            yield size_of(weights, nbytes, self.form) | types

    def _store_linears(self, settings: EvaluationSettings) -> int:
        model, tokenizer, _ = loaded(settings.model)
        calibration = self._calibration(settings)
        if self.linear_form in CALIBRATED:
            made = change_loaded(model, tokenizer, settings.model, CALIBRATED[self.linear_form], calibration)
            return sum(record.nbytes for record in made.statistics)
        if self.linear_form in WEIGHTED:
            windows = calibration.draw_from_corpus(tokenizer)
            return store(model, self.linear_form, mixtures.importance(model, windows))
        if self.method != DENSE:
            sparsity = self.sparsity if self.pattern is None else 0.5
            pruning = Pruning.by(self.method, sparsity, self.pattern)
            change_loaded(model, tokenizer, settings.model, pruning, calibration)
        return store(model, self.linear_form)

    def _store_head(self, settings: EvaluationSettings) -> int:
        model, tokenizer, _ = loaded(settings.model)
        gram = None
        if self.head_form in SPQR:
            gram = head_gram(model, self._calibration(settings).draw_from_corpus(tokenizer))
        return store_head(model, self.head_form, gram)

    def _calibration(self, settings: EvaluationSettings) -> Calibration:
        corpus = self.calibration_corpus or settings.corpus
        return Calibration(corpus, self.calibration_windows, settings.sequence_length, self.seed)

    @property
    def _method(self) -> object:
        return CALIBRATED.get(self.linear_form) or METHODS.get(self.method)  # None for a dense model

    @property
    def code(self) -> dict[str, object] | None:
        """The code of the variant's own method, not of all of them, and the method's settings; None as for all."""
        if not is_followed(self._method):
            return None
        mixed = self.form in MIXED | WEIGHTED
        code = made_by(__name__, self._method, without=() if mixed else ("toolkit.studies.mixtures",))
        found = {"code": sources.fingerprint(code), "method": settings_of(self._method)}
        return found | (mixtures.LLAMA_CPP if mixed else {})


def compare_variants(variants: Sequence[ModelVariant], settings: EvaluationSettings) -> pd.DataFrame:
    """Quality and bytes of each variant: one row a variant and metric.

    Columns: model, corpus, the variant's `labels`, zeros (share really there), bits_per_weight (of all decoder linears;
    embeddings and head are not counted), ratio (over 16 bits), entropy_bits (NaN for forms without a bitmap), those of
    `quality`, evidence, and with forms of llama.cpp types (`mixtures.type_shares`). Raises what `quality` raises.
    """
    rows = pd.concat([quality(settings, variant).assign(**variant.labels) for variant in variants], ignore_index=True)
    table = rows[rows["metric"].ne(WINDOW_NLL)].assign(model=settings.model, corpus=settings.corpus)
    first = ["model", "corpus", *variants[0].labels, "zeros", "bits_per_weight", "ratio", "entropy_bits"]
    table = table[[*first, *(name for name in table if name not in first)]].assign(evidence="measured")
    return table.reset_index(drop=True)


def of_second_model(
    variants: Sequence[ModelVariant], settings: EvaluationSettings, model: str, windows: int
) -> pd.DataFrame:
    """The perplexity of the same variants of another model, calibrated and evaluated on so many windows.

    The table of `compare_variants`, and the column relative: the perplexity over that of the first variant. `metric` is
    `SECOND_PERPLEXITY`, so that no claim about the first model finds these rows. The table is empty if the model is
    "none". Raises what `compare_variants` raises.
    """
    if model == "none":
        return pd.DataFrame()
    fewer = [replace(each, calibration_windows=windows if each.calibration_windows else None) for each in variants]
    table = compare_variants(fewer, replace(settings, model=model, windows=windows, tasks=(), task_limit=None))
    return table.assign(relative=table["value"] / table["value"].iloc[0], metric=SECOND_PERPLEXITY)


def few_bits_variants(forms: Sequence[str], windows: int | None, seed: int) -> list[ModelVariant]:
    """A dense model in 16 bits and in each form; those of `CALIBRATED` and `WEIGHTED` with so many windows."""
    settings = {"calibration_windows": windows, "seed": seed}
    made = (ModelVariant(form) for form in ("fp16", *forms))
    return [
        replace(variant, **settings) if variant.linear_form in CALIBRATED | WEIGHTED else variant for variant in made
    ]


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
        return FEW_BITS_CALIBRATED if row["form"].removesuffix(HEAD_TOO) in CALIBRATED | WEIGHTED else FEW_BITS
    return f"{row['method']}, {row['form'].split(',')[0]} values"


def pareto_front(size: pd.Series, cost: pd.Series) -> pd.Series:
    """Mark the points that no other point beats: none is at most as large and at most as costly, and better in one."""
    points = np.stack([size.to_numpy(float), cost.to_numpy(float)], axis=1)
    beaten = [bool(((points <= point).all(1) & (points < point).any(1)).any()) for point in points]
    return pd.Series(np.logical_not(beaten), index=size.index)
