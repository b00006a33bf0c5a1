"""Experiments whose results are kept and that more than one notebook uses."""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.studies import predictors
    from toolkit.studies.forms import CALIBRATED, FORMS, entropy_bits, linears, store
    from toolkit.studies.loaded import tokens_of
    from toolkit.studies.mixtures import form_of
    from toolkit.studies.predictors import ALONE, PredictorVariant, compare_predictors
    from toolkit.studies.quality import AS_IS, Alteration, EvaluationSettings, accuracy, compared, paired, restored
    from toolkit.studies.ratios import ratio_range
    from toolkit.studies.thresholded import ThresholdedModel, few_samples, thresholds, trace
    from toolkit.studies.variants import ModelVariant, by_variant, compare_variants, few_bits_variants, of_second_model
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ALONE",
    "AS_IS",
    "CALIBRATED",
    "FORMS",
    "Alteration",
    "EvaluationSettings",
    "ModelVariant",
    "PredictorVariant",
    "ThresholdedModel",
    "accuracy",
    "by_variant",
    "compare_predictors",
    "compare_variants",
    "compared",
    "entropy_bits",
    "few_bits_variants",
    "few_samples",
    "form_of",
    "linears",
    "of_second_model",
    "paired",
    "predictors",
    "ratio_range",
    "restored",
    "store",
    "thresholds",
    "tokens_of",
    "trace",
]
