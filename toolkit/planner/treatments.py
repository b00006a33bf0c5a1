"""The treatments of weights: each is an alteration of a model, whose price in quality is measured."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd

from toolkit import downloads
from toolkit.cache import kept
from toolkit.files import file_sha256
from toolkit.models import MODELS
from toolkit.models.named import gguf_file, parts_of
from toolkit.papers.beyond.sparse_curve import Zeros
from toolkit.papers.corm.expert_quality import ExpertVariant
from toolkit.papers.corm.routing import RoutedModel
from toolkit.planner.ways import SPARSITIES, WITH_HEAD, ZEROS
from toolkit.sparsity.changed import LOADING
from toolkit.studies.forms import HEAD_TOO
from toolkit.studies.quality import AS_IS, Alteration, EvaluationSettings, compared
from toolkit.studies.variants import ModelVariant

CALIBRATION_WINDOWS = 8
EXACT = {"dense", "gguf F16", "experts 16"}  # no weight changes
# GGUF type -> llama-quantize's mixture
MIXTURE_OF_TYPE = {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_S"}


def _pruned(form: str, sparsity: float, pattern: str | None = None) -> ModelVariant:
    return ModelVariant(form, "sparsegpt", sparsity, pattern, CALIBRATION_WINDOWS)


VARIANTS = {
    "int8": ModelVariant("int8"),
    "spqr": ModelVariant("int3, spqr 1 %", calibration_windows=CALIBRATION_WINDOWS),
    "sparsegpt 2:4": _pruned("fp16, 2:4", 0.5, "2:4"),
}
VARIANTS |= {f"sparsegpt {share:g}": _pruned("fp16, endor", share) for share in SPARSITIES}
VARIANTS |= {f"sparsegpt {share:g} int8": _pruned("int8, endor", share) for share in SPARSITIES}
VARIANTS |= {
    f"{name}{HEAD_TOO}": replace(variant, form=f"{variant.form}{HEAD_TOO}")
    for name, variant in VARIANTS.items()
    if name in ("int8", "spqr", f"sparsegpt {WITH_HEAD:g} int8")
}
VARIANTS |= {f"gguf {kind}": ModelVariant(f"{mixture}, llama.cpp") for kind, mixture in MIXTURE_OF_TYPE.items()}
FEW_BITS = {f"few_bits {share:g}": Zeros("threshold, few-bit predictor", share) for share in ZEROS}
EXPERTS = {f"experts {bits}": ExpertVariant(RoutedModel(), bits) for bits in (4, 2)}
ALTERATIONS: dict[str, Alteration] = VARIANTS | FEW_BITS | EXPERTS


def identity(model: str) -> Mapping[str, object]:
    """A fingerprint of a model's weights, without reading them all."""
    if model in MODELS:
        file = parts_of(model)
        return {"gguf": downloads.DOWNLOADS[MODELS[model].gguf].sha256, "parts": file and file_sha256(file)}
    folder, gguf = Path(model), gguf_file(model)
    if gguf is None and not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")  # its folder is named after the commit
        return {"snapshot": Path(found).parent.name if isinstance(found, str) else None}
    files = [gguf] if gguf else sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
    return {"files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]}


@kept("planned_quality", without=LOADING, key=identity)
def measured(model: str, treatment: str, settings: EvaluationSettings) -> pd.DataFrame:
    """The price of a treatment, in one row.

    Columns: difference (log-perplexity less that of the model as it is, nats a token), difference_error (its standard
    error over windows). Raises `UserError` for a treatment that this model cannot have, and what `compared` raises.
    """
    table = compared(settings, {"as it is": AS_IS, treatment: ALTERATIONS[treatment]})
    return table[["difference", "difference_error"]].tail(1)
