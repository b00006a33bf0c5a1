"""What is done to a model's weights before it runs, by one name in plans, in measured curves and in measurements.

A treatment has a level: the share of zeros, a pattern such as "2:4", or bits. Those of `FORMS` have one level only.

- "dense": nothing. "int8", "int4 hqq", "spqr", "gguf Q8_0" and its like: fewer bits, without zeros.
- "sparsegpt", "wanda", "magnitude": pruned, in 16 bits; with " int8" behind the name also rounded to int8.
- "zeros": thresholds cut this share of each layer's FFN outputs; "zeros few_bits": the predictor of that name foretells
  them; "zeros recovered": a model distilled for it.
- "experts": experts in 4 or 2 bits, or "mixed"; "experts attention int4": a layer's other matrices in 4 bits as well.
"""

import re

from toolkit.policies.methods import LLAMA_CPP
from toolkit.pruning import METHODS
from toolkit.pruning.pruned import DENSE
from toolkit.studies.expert_quality import HALF, VARIANTS
from toolkit.studies.sparse_curve import RECOVERED
from toolkit.studies.variants import ModelVariant

INT8, GGUF, CALIBRATION_WINDOWS = " int8", "gguf ", 8
MIXTURES = {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_S"}  # GGUF type -> llama-quantize's mixture
FORMS = {"int8": "int8", "int4 hqq": "int4, hqq", "spqr": "int3, spqr 1 %"} | {
    GGUF + kind: f"{mixture}, llama.cpp" for kind, mixture in MIXTURES.items()
}
EXACT = {("dense", "16"), ("experts", "16")} | {(GGUF + kind, "16") for kind in LLAMA_CPP.values() if kind == "F16"}
ZEROS = {"zeros": "threshold", "zeros few_bits": "threshold, few-bit predictor", "zeros recovered": RECOVERED}
EXPERTS = {  # (treatment, level) -> variant of `expert_quality`
    ("experts" if attention == HALF else "experts attention int4", str(bits)): name
    for name, (bits, attention, foretold, skipped) in VARIANTS.items()
    if not (foretold or skipped or bits == HALF)
}
TREATMENTS = (DENSE, *FORMS, *METHODS, *(name + INT8 for name in METHODS), *ZEROS, *{name for name, _ in EXPERTS})


def variant_of(treatment: str, level: str) -> ModelVariant | None:
    """The model that `toolkit.studies.variants` measures for a treatment; None if that does not know it."""
    if treatment in FORMS:
        return ModelVariant(FORMS[treatment], calibration_windows=CALIBRATION_WINDOWS if treatment == "spqr" else None)
    method, int8, _ = treatment.partition(INT8)
    if method not in METHODS:
        return None
    pattern = level if ":" in level else None
    form = f"{'int8' if int8 else 'fp16'}, {'2:4' if pattern == '2:4' else 'endor'}"
    sparsity = 0.5 if pattern else float(level)
    return ModelVariant(form, method, sparsity, pattern, CALIBRATION_WINDOWS)


def treatment_of(form: str, method: str, sparsity: float, pattern: str) -> tuple[str, str] | None:
    """Treatment and level of a row of `compare_variants`; None for a form that no plan has."""
    if method in (DENSE, form):
        names = {name for name, known in FORMS.items() if known == form}
        return (names.pop(), re.search(r"\d+", form)[0]) if names else None
    return method + (INT8 if form.startswith("int8") else ""), pattern if ":" in pattern else f"{sparsity:g}"
