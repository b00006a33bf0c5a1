"""What a treatment does to a model's perplexity, measured on this machine and kept."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from toolkit.cache import kept
from toolkit.errors import UserError
from toolkit.evaluation import paired_difference, perplexity
from toolkit.files import file_sha256
from toolkit.models import MODELS, downloads
from toolkit.models.cutting import thresholds_of
from toolkit.models.loading import gguf_file, parts_of
from toolkit.planner.treatments import EXPERTS, TREATMENTS, ZEROS, variant_of
from toolkit.studies.expert_quality import quality_table
from toolkit.studies.routing import RoutedModel
from toolkit.studies.sparse_curve import WAYS, Fitted, dense_model
from toolkit.studies.variants import EvaluationSettings, ModelVariant, compare_variants


def _identity(model: str) -> Mapping[str, object]:
    """What tells the weights of a model apart, without reading them all."""
    if model in MODELS:
        file = parts_of(model)
        return {"gguf": downloads.DOWNLOADS[MODELS[model].gguf].sha256, "parts": file and file_sha256(file)}
    if (gguf := gguf_file(model)) is not None:
        return {"gguf": file_sha256(gguf)}
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")  # its folder is named after the commit
        return {"snapshot": Path(found).parent.name if isinstance(found, str) else None}
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
    return {"files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]}


@kept("planned_quality", without=("toolkit.models.loading",), key=_identity)
def measured(model: str, treatment: str, level: str, settings: EvaluationSettings) -> pd.DataFrame:
    """The price of a treatment, in one row.

    Columns: log_difference (log-perplexity less that of the model as it is, nats a token), difference_error (its
    standard error over windows), corpus, windows, sequence_length. Raises `UserError` for a treatment or a level that
    this model cannot have, and what the studies raise.
    """
    if treatment in ZEROS:
        difference, error = _of_zeros(treatment, level, settings)
    elif (treatment, level) in EXPERTS:
        setting = RoutedModel(model, settings.corpus, settings.windows, settings.sequence_length)
        row = quality_table(setting, (EXPERTS[treatment, level],)).iloc[-1]
        difference, error = row["log_difference"], row["difference_error"]
    else:
        variant = variant_of(treatment, level)
        if variant is None:
            raise UserError(f"{treatment} at {level} is not measured here; known are {', '.join(TREATMENTS)}")
        difference, error = _of_variant(variant, settings)
    row = {"log_difference": difference, "difference_error": error, "corpus": settings.corpus}
    return pd.DataFrame([row | {"windows": settings.windows, "sequence_length": settings.sequence_length}])


def _of_variant(variant: ModelVariant, settings: EvaluationSettings) -> tuple[float, float]:
    _, windows = compare_variants([ModelVariant(), variant], settings)
    nll = windows["nll"].to_numpy().reshape(2, -1)  # the variants one after the other
    return paired_difference(nll[1].tolist(), nll[0].tolist())


def _of_zeros(treatment: str, level: str, settings: EvaluationSettings) -> tuple[float, float]:
    if ZEROS[treatment] not in WAYS:
        raise UserError(f"{treatment}: a recovered model takes hours to make: `python -m toolkit.recovery`")
    model, fitted, tokens = dense_model(settings)
    if thresholds_of(model) is not None:
        raise UserError(f"{settings.model} has thresholds of its own: ask for the share of zeros that they cut")
    dense = perplexity(model, tokens, settings.sequence_length, settings.windows)
    with WAYS[ZEROS[treatment]](Fitted(model, fitted), float(level)):
        cut = perplexity(model, tokens, settings.sequence_length, settings.windows)
    return paired_difference(cut.window_nll, dense.window_nll)
