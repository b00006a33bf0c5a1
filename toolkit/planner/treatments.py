"""Each treatment of weights that a way needs: its name, and the alteration of a model that shows what it costs."""

from dataclasses import replace

from toolkit.planner.ways import SPARSITIES, WITH_HEAD, ZEROS
from toolkit.studies.expert_quality import ExpertVariant
from toolkit.studies.forms import HEAD_TOO
from toolkit.studies.quality import Alteration
from toolkit.studies.routing import RoutedModel
from toolkit.studies.sparse_curve import Zeros
from toolkit.studies.variants import ModelVariant

CALIBRATION_WINDOWS = 8
EXACT = {"dense", "gguf F16", "experts 16"}  # no weight changes
MIXTURES = {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_S"}  # GGUF type -> llama-quantize's mixture


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
VARIANTS |= {f"gguf {kind}": ModelVariant(f"{mixture}, llama.cpp") for kind, mixture in MIXTURES.items()}
FEW_BITS = {f"few_bits {share:g}": Zeros("threshold, few-bit predictor", share) for share in ZEROS}
EXPERTS = {f"experts {bits}": ExpertVariant(RoutedModel(), bits) for bits in (4, 2)}
ALTERATIONS: dict[str, Alteration] = VARIANTS | FEW_BITS | EXPERTS
