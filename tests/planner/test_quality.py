"""Prices in quality: the file is what the kept tables say, and nothing is read between two models."""

from dataclasses import replace
from math import exp, isnan

import pandas as pd
import pytest

from toolkit.errors import UserError
from toolkit.evidence.reference import reference_dir
from toolkit.models.architectures import ARCHITECTURES
from toolkit.planner import measured, quality
from toolkit.planner.prices import DIGITS, load_prices, make_prices, prices_file, write_prices
from toolkit.planner.quality import price_of
from toolkit.planner.target import Target, open_target
from toolkit.planner.treatments import ALTERATIONS, EXACT
from toolkit.planner.ways import NEURONS, ZEROS, ways
from toolkit.studies.forms import HEAD_TOO

ZEN4 = reference_dir() / "epyc-zen4-2c"
WAYS = {way.name: way for experts in (False, True) for way in ways(experts, () if experts else ZEROS)}
HALF = WAYS["endor, 50 % zeros"]


def test_the_file_is_what_the_kept_results_say(tmp_path):
    written = write_prices(tmp_path / "prices.csv").read_text()
    assert written == prices_file().read_text(), "run `python -m toolkit.planner.prices`"


def test_prices_stand_in_the_kept_tables():
    prices = load_prices()
    points = prices[(prices["machine"] == "epyc-zen4-2c")].set_index(["source", "treatment"])

    def perplexity_of(source, **labels):
        table = pd.read_csv(ZEN4 / source / "table.csv")
        for name, value in labels.items():
            table = table[table[name] == value]
        return float(DIGITS % table["perplexity" if "perplexity" in table else "value"].item())

    text = {"metric": "perplexity"}
    endor = "endor/tab_perplexity"
    two_four = points.loc[(endor, "sparsegpt 2:4")]
    assert two_four["perplexity"] == perplexity_of(endor, **text, method="sparsegpt", pattern="2:4")
    assert two_four["dense_perplexity"] == perplexity_of(endor, **text, method="dense", form="fp16")
    assert (two_four["windows"], two_four["sequence_length"], two_four["bits"]) == (4, 1024, 9)
    spqr = perplexity_of("spqr/tab_perplexity", form="int3, spqr 1 %")
    assert points.loc[("spqr/tab_perplexity", "spqr"), "perplexity"] == spqr
    cut = points.loc[("beyond/sparse_curve", "few_bits 0.9"), "perplexity"]
    assert cut == perplexity_of("beyond/sparse_curve", family="threshold, few-bit predictor", asked=0.9)


def test_each_way_has_a_treatment_that_can_be_measured_and_was():
    assert {way.treatment for way in WAYS.values()} == ALTERATIONS.keys() | EXACT
    without_head = {name for name in ALTERATIONS if not name.endswith(HEAD_TOO)}  # no kept result packs a head yet
    assert set(load_prices()["treatment"]) == without_head


def test_a_folder_without_results_gives_no_price(tmp_path):
    assert make_prices(tmp_path).empty


PRICE = {
    "treatment": "sparsegpt 0.5",
    "bits": 9.5,
    "corpus": "text",
    "sequence_length": 64,
    "windows": 2,
    "ratio_error": None,
    "dense_perplexity": 10.0,
}


@pytest.fixture
def prices(monkeypatch, tmp_path):
    """A model on three machines, and in a source with less text; and another model."""
    rows = [
        {"model": "one", "perplexity": 20.0, "machine": "a", "source": "x"},
        {"model": "one", "perplexity": 21.0, "machine": "b", "source": "x"},
        {"model": "one", "perplexity": 19.0, "machine": "c", "source": "x"},
        {"model": "one", "perplexity": 30.0, "machine": "a", "source": "y", "windows": 1},
        {"model": "two", "perplexity": 11.0, "machine": "a", "source": "x"},
        {"model": "two", "perplexity": 12.0, "machine": "a", "source": "y", "treatment": "gguf Q4_K", "bits": 5.53},
    ]
    table = pd.DataFrame([PRICE | row for row in rows])
    monkeypatch.setattr(quality, "load_prices", lambda: table)
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    return table


def embedded(name, **settings):
    """Without its file, which an empty cache lacks."""
    return Target(name, ARCHITECTURES["tinyllama-1.1b"], 2, True, **settings)


def test_the_price_is_that_of_most_text_with_the_range_over_machines(prices):
    found = price_of(open_target("llama2-7b"), HALF)
    assert (found.ratio, found.low, found.high) == (2.0, 1.9, 2.1)
    assert (found.model, found.bits) == ("one", 9.5)


def test_the_models_own_price_comes_first(prices):
    found = price_of(replace(open_target("llama2-7b"), name="two"), HALF)
    assert (found.ratio, found.model) == (1.1, "two")


def test_what_was_not_measured_has_no_price(prices):
    found = price_of(open_target("llama2-7b"), WAYS["int8"])
    assert isnan(found.ratio)
    assert found.model == ""


def test_a_price_at_other_bits_is_not_known(prices):
    target, way = open_target("llama2-7b"), WAYS["llama.cpp Q4_K"]
    assert isnan(price_of(target, way).ratio)
    assert price_of(target, way).model == "– (two: 5.5 bits)"
    assert price_of(target, replace(way, bits=5.5)).ratio == 1.2


def test_what_changes_no_weight_costs_nothing(prices):
    for name in ("dense", "llama.cpp F16", "experts, 16 bits"):
        assert price_of(open_target("llama2-7b"), WAYS[name]).ratio == 1
    sparse = embedded("smollm2-135m-sparse90", own_thresholds=True, zeros=0.8996)
    (way,) = (way for way in ways(False, sparse.cut) if way.kind == NEURONS)
    assert price_of(sparse, way).ratio == 1


def test_measured_once_then_known(prices, monkeypatch):
    """Windows lose 0.2 nats with a standard error of 0.1."""
    calls = []

    def compared(settings, alterations):
        altered = alterations["sparsegpt 0.5"]
        calls.append((altered.method, altered.sparsity, settings.windows))
        return pd.DataFrame({"difference": [0, 0.2], "difference_error": [0, 0.1]})

    monkeypatch.setattr(measured, "compared", compared)
    target = embedded("smollm2-135m")
    assert price_of(target, HALF).model == "one"
    found = price_of(target, HALF, measure=True)
    assert found.ratio == pytest.approx(exp(0.2))
    assert (found.low, found.high) == (pytest.approx(exp(0.1)), pytest.approx(exp(0.3)))
    assert found.model == "smollm2-135m"
    assert price_of(target, HALF) == price_of(target, HALF, measure=True) == found
    assert price_of(target, HALF, text="python-sources").model == "one"
    assert calls == [("sparsegpt", 0.5, 2)]


def test_what_cannot_be_measured_says_why(prices, monkeypatch, caplog):
    def refused(*_):
        raise UserError("it has no experts")

    monkeypatch.setattr(measured, "compared", refused)
    assert isnan(price_of(embedded("smollm2-135m"), WAYS["experts, 4 bits"], measure=True).ratio)
    assert "quality with experts 4 is not measured: it has no experts" in caplog.text
