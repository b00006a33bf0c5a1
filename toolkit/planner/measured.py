"""The cost of a treatment in a model's perplexity, measured on this machine and kept."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from toolkit import downloads
from toolkit.cache import kept
from toolkit.files import file_sha256
from toolkit.models import MODELS
from toolkit.models.loading import gguf_file, parts_of
from toolkit.planner.treatments import ALTERATIONS
from toolkit.studies.quality import AS_IS, EvaluationSettings, compared


def _identity(model: str) -> Mapping[str, object]:
    """A fingerprint of a model's weights, without reading them all."""
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
def measured(model: str, treatment: str, settings: EvaluationSettings) -> pd.DataFrame:
    """The price of a treatment, in one row.

    Columns: difference (log-perplexity less that of the model as it is, nats a token), difference_error (its standard
    error over windows). Raises `UserError` for a treatment that this model cannot have, and what `compared` raises.
    """
    table = compared(settings, {"as it is": AS_IS, treatment: ALTERATIONS[treatment]})
    return table[["difference", "difference_error"]].tail(1)
