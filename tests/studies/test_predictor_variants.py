"""Names of predictors' variants, in tables and in the cache."""

from toolkit.studies import predictors


def test_variants_that_predict_alike_are_measured_once():
    one = predictors.PredictorVariant("low_rank", (128, 128))
    assert predictors.PredictorVariant("low_rank", (128, 128), 4) == one
    assert predictors.PredictorVariant("low_rank", (128, 256), 0) == one
    assert predictors.PredictorVariant("low_rank", (128, 256), 4) != one
    kept = predictors.PredictorVariant("gate", kept=0.95)
    assert predictors.PredictorVariant("gate", kept=0.95, cut=False).predictor == kept
    assert predictors.PredictorVariant("gate", kept=0.95, cut=False) != kept
