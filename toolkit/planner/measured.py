"""What a treatment does to a model's perplexity, measured on this machine and kept."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from toolkit.cache import kept
from toolkit.errors import UserError
from toolkit.files import file_sha256
from toolkit.models import MODELS, downloads
from toolkit.models.cutting import thresholds_of
from toolkit.models.loading import gguf_file, parts_of
from toolkit.planner.treatments import EXPERTS, TREATMENTS, ZEROS, variant_of
from toolkit.studies.expert_quality import expert_variants
from toolkit.studies.loaded import loaded
from toolkit.studies.quality import AS_IS, Alteration, EvaluationSettings, compared
from toolkit.studies.routing import RoutedModel
from toolkit.studies.sparse_curve import WAYS, Zeros
from toolkit.studies.variants import ModelVariant


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
    dense, altered = _alterations(model, treatment, level, settings)
    row = compared(settings, {"dense": dense, "altered": altered}).iloc[-1]
    difference, error = row["difference"], row["difference_error"]
    row = {"log_difference": difference, "difference_error": error, "corpus": settings.corpus}
    return pd.DataFrame([row | {"windows": settings.windows, "sequence_length": settings.sequence_length}])


def _alterations(model: str, treatment: str, level: str, settings: EvaluationSettings) -> tuple[Alteration, Alteration]:
    """The model as the treatment has it without any loss, and treated."""
    if (treatment, level) in EXPERTS:
        setting = RoutedModel(model, settings.corpus, settings.windows, settings.sequence_length)
        dense, altered = expert_variants(setting, ("16 bits", EXPERTS[treatment, level])).values()
        return dense, altered
    if treatment in ZEROS:
        if ZEROS[treatment] not in WAYS:
            raise UserError(f"{treatment}: a recovered model takes hours to make: `python -m toolkit.recovery`")
        if thresholds_of(loaded(model)[0]) is not None:
            raise UserError(f"{model} has thresholds of its own: ask for the share of zeros that they cut")
        return AS_IS, Zeros(ZEROS[treatment], float(level))
    if (variant := variant_of(treatment, level)) is None:
        raise UserError(f"{treatment} at {level} is not measured here; known are {', '.join(TREATMENTS)}")
    return ModelVariant(), variant
