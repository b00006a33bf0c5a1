"""Prices in quality: the file of curves is what the kept tables say, and nothing is read between two models."""

from dataclasses import replace
from math import exp, sqrt

import pandas as pd
import pytest

from toolkit.errors import UserError
from toolkit.evidence.reference import reference_dir
from toolkit.models.architectures import ARCHITECTURES
from toolkit.planner import measured, quality
from toolkit.planner.curves import DIGITS, curves_file, load_curves, make_curves, write_curves
from toolkit.planner.quality import Quality, measure_quality, of_these_bits, quality_of
from toolkit.planner.target import Target, open_target
from toolkit.planner.treatments import TREATMENTS, treatment_of, variant_of

ZEN4 = reference_dir() / "epyc-zen4-2c"


def test_the_file_is_what_the_kept_results_say(tmp_path):
    written = write_curves(tmp_path / "curves.csv").read_text()
    assert written == curves_file().read_text(), "run `python -m toolkit.planner.curves`"


def test_points_stand_in_the_kept_tables():
    curves = load_curves()
    points = curves[(curves["machine"] == "epyc-zen4-2c")].set_index(["source", "treatment", "level"])

    def perplexity_of(source, **labels):
        table = pd.read_csv(ZEN4 / source / "table.csv")
        for name, value in labels.items():
            table = table[table[name] == value]
        return float(DIGITS % table["perplexity" if "perplexity" in table else "value"].item())

    text = {"metric": "perplexity"}
    endor = "endor/tab_perplexity"
    two_four = points.loc[(endor, "sparsegpt", "2:4")]
    assert two_four["perplexity"] == perplexity_of(endor, **text, method="sparsegpt", pattern="2:4")
    assert two_four["dense_perplexity"] == perplexity_of(endor, **text, method="dense", form="fp16")
    assert (two_four["windows"], two_four["sequence_length"], two_four["bits"]) == (4, 1024, 9)
    spqr = perplexity_of("spqr/tab_perplexity", form="int3, spqr 1 %")
    assert points.loc[("spqr/tab_perplexity", "spqr", "3"), "perplexity"] == spqr
    cut = points.loc[("beyond/sparse_curve", "zeros", "0.9"), "perplexity"]
    assert cut == perplexity_of("beyond/sparse_curve", family="threshold", asked=0.9)
    assert set(curves["treatment"]) <= set(TREATMENTS)


def test_a_folder_without_results_gives_no_curve(tmp_path):
    assert make_curves(tmp_path).empty


@pytest.mark.parametrize("treatment", ["int8", "spqr", "gguf Q4_0"])
def test_forms_come_back(treatment):
    variant = variant_of(treatment, "")
    assert treatment_of(variant.form, variant.method, variant.sparsity, "none")[0] == treatment


@pytest.mark.parametrize(("treatment", "level"), [("wanda", "0.7"), ("sparsegpt int8", "2:4"), ("magnitude", "2:4")])
def test_pruned_variants_come_back(treatment, level):
    variant = variant_of(treatment, level)
    assert treatment_of(variant.form, variant.method, variant.sparsity, variant.zeros_pattern) == (treatment, level)


CURVE = {
    "bits": 9.5,
    "corpus": "text",
    "sequence_length": 64,
    "windows": 2,
    "ratio_error": None,
    "dense_perplexity": 10.0,
}


@pytest.fixture
def curves(monkeypatch, tmp_path):
    """Two models: one that costs twice at 0.4 zeros and eight times at 0.8, and another."""
    rows = [
        {"model": "one", "treatment": "wanda", "level": "0.4", "perplexity": 20.0, "machine": "a", "source": "x"},
        {"model": "one", "treatment": "wanda", "level": "0.4", "perplexity": 21.0, "machine": "b", "source": "x"},
        {"model": "one", "treatment": "wanda", "level": "0.4", "perplexity": 19.0, "machine": "c", "source": "x"},
        {"model": "one", "treatment": "wanda", "level": "0.8", "perplexity": 80.0, "machine": "a", "source": "x"},
        {"model": "one", "treatment": "wanda", "level": "2:4", "perplexity": 50.0, "machine": "a", "source": "x"},
        {"model": "two", "treatment": "wanda", "level": "0.6", "perplexity": 11.0, "machine": "a", "source": "x"},
        {"model": "two", "treatment": "spqr", "level": "3", "perplexity": 12.0, "machine": "a", "source": "y"},
    ]
    table = pd.DataFrame([CURVE | row for row in rows])
    monkeypatch.setattr(quality, "load_curves", lambda: table)
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    return table


def embedded(name, **settings):
    """Without its file, which an empty cache lacks."""
    return Target(name, ARCHITECTURES["tinyllama-1.1b"], 2, True, "registry", "llama", **settings)


def test_a_measured_level_and_the_range_over_machines(curves):
    found = quality_of(open_target("llama2-7b"), "wanda", 0.4)
    assert (found.ratio, found.low, found.high) == (2.0, 1.9, 2.1)
    assert (found.own, found.model, found.interpolated) == (False, "one", False)
    assert (found.source, found.bits) == ("x (2 windows of 64, text; a, b, c)", 9.5)
    assert quality_of(open_target("llama2-7b"), "wanda", "2:4").ratio == 5.0


def test_between_two_levels_of_one_model(curves):
    """Half of the way between 2 and 8 in logarithms is 4; the other model's point at 0.6 is not used."""
    found = quality_of(open_target("llama2-7b"), "wanda", 0.6)
    assert found.ratio == pytest.approx(4.0)
    assert (found.low, found.high, found.interpolated) == (1.9, 8.0, True)
    below = quality_of(open_target("llama2-7b"), "wanda", 0.2)
    assert below.ratio == pytest.approx(sqrt(2))
    assert (below.low, below.high) == (1.0, 2.1)


def test_the_models_own_curve_comes_first(curves):
    target = replace(open_target("llama2-7b"), name="two")
    found = quality_of(target, "wanda", 0.6)
    assert (found.ratio, found.own, found.model) == (1.1, True, "two")
    found = quality_of(target, "wanda", 0.7)  # nothing of its own on both sides
    assert (found.own, found.model) == (False, "one")


def test_nothing_beyond_the_measured_levels(curves):
    target = open_target("llama2-7b")
    assert quality_of(target, "wanda", 0.9) is None
    assert quality_of(target, "wanda", "4:8") is None
    assert quality_of(target, "sparsegpt", 0.4) is None
    assert quality_of(target, "experts", 4) is None
    assert quality_of(open_target("mixtral-8x7b"), "zeros", 0.8) is None


def test_what_changes_no_weight_costs_nothing(curves):
    for treatment in ("dense", "gguf F16"):
        assert quality_of(open_target("llama2-7b"), treatment, 16).ratio == 1
    assert quality_of(open_target("mixtral-8x7b"), "experts", 16).ratio == 1
    sparse = embedded("smollm2-135m-sparse90", own_thresholds=True, zeros=0.8996)
    assert quality_of(sparse, "zeros", 0.9).ratio == 1
    assert quality_of(sparse, "zeros", 0.8) is None


@pytest.mark.parametrize(
    ("treatment", "level", "words"),
    [
        ("wandas", 0.5, "did you mean 'wanda'"),
        ("wanda", 50, "expected a share of zeros"),
        ("wanda", "half", "expected a share of zeros"),
        ("zeros", "2:4", "expected a share of zeros"),
        ("experts", 3, "choose from: 16, 2, 4, mixed"),
    ],
)
def test_bad_treatments_and_levels_are_refused(curves, treatment, level, words):
    with pytest.raises(UserError, match=words):
        quality_of(open_target("llama2-7b"), treatment, level)


def test_measured_once_then_known(curves, monkeypatch):
    """A difference of 0.2 nats with a standard error of 0.1."""
    calls = []

    def compared(settings, alterations):
        altered = alterations["altered"]
        calls.append((altered.method, altered.sparsity, settings.windows))
        return pd.DataFrame({"difference": [0, 0.2], "difference_error": [0, 0.1]})

    monkeypatch.setattr(measured, "compared", compared)
    target = embedded("smollm2-135m")
    assert quality_of(target, "wanda", 0.4).model == "one"
    found = measure_quality(target, "wanda", 0.4)
    assert found.ratio == pytest.approx(exp(0.2))
    assert (found.low, found.high) == (pytest.approx(exp(0.1)), pytest.approx(exp(0.3)))
    assert (found.own, found.source) == (True, "measured here (2 windows of 512, wiki-slice)")
    assert quality_of(target, "wanda", 0.4) == measure_quality(target, "wanda", 0.4) == found
    assert quality_of(target, "wanda", 0.4, windows=4).model == "one"
    assert calls == [("wanda", 0.4, 2)]


def test_what_cannot_be_measured_says_why(curves, caplog):
    assert measure_quality(open_target("llama2-7b"), "wanda", 0.5) is None
    assert "of this architecture no weights can be loaded" in caplog.text
    assert measure_quality(embedded("smollm2-135m"), "zeros recovered", 0.8) is None
    assert "python -m toolkit.recovery" in caplog.text


def test_a_price_at_other_bits_is_not_known():
    price = Quality(1.04, 1.0, 1.1, False, "small", "a notebook", bits=5.53)
    assert of_these_bits(price, 4.5) is None
    assert of_these_bits(price, 5.5) is price
    assert of_these_bits(replace(price, bits=None), 4.5) == replace(price, bits=None)
    assert of_these_bits(None, 4.5) is None
