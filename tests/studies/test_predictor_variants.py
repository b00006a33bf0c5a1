"""Names of predictors' variants, in tables and in the cache."""

from toolkit.studies import predictors


def test_labels_tell_variants_apart():
    variant = predictors.PredictorVariant
    assert variant("low_rank", (128, 128)).label == "low rank 128 above 0.5"
    assert variant("low_rank", (128, 256), 4, 0.7).label == "low rank 128-256 above 0.7"
    assert variant("gate", kept=0.95, cut=False).label == "gate keeps 95 % all used"
    assert predictors.ALONE.label == "none"


def test_variants_that_predict_alike_are_measured_once():
    one = predictors.PredictorVariant("low_rank", (128, 128))
    assert predictors.PredictorVariant("low_rank", (128, 128), 4).named_once == one
    assert predictors.PredictorVariant("low_rank", (128, 256), 0).named_once == one
    assert predictors.PredictorVariant("low_rank", (128, 256), 4).named_once != one
    kept = predictors.PredictorVariant("gate", kept=0.95)
    assert predictors.PredictorVariant("gate", kept=0.95, cut=False).predictor == kept
    assert predictors.PredictorVariant("gate", kept=0.95, cut=False).named_once != kept


def test_every_table_has_the_rivals_that_cost_no_byte():
    assert [variant.label for variant in predictors.RIVALS] == ["copy last", "nothing"]
