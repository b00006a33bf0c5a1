"""Prices in quality: the file is what the kept tables say, and nothing is read between two models."""

from dataclasses import replace
from math import exp, isnan

import pandas as pd
import pytest

from toolkit.evidence.reference import reference_dir
from toolkit.models.architectures import ARCHITECTURES
from toolkit.planner import prices as planner_prices
from toolkit.planner import treatments
from toolkit.planner.prices import DIGITS, load_prices, price_of, prices_file, write
from toolkit.planner.ranges import ranges_file
from toolkit.planner.target import Target, open_target
from toolkit.planner.treatments import ALTERATIONS, EXACT
from toolkit.planner.ways import ZEROS, ways

ZEN4 = reference_dir() / "epyc-zen4-2c"
WAYS = {way.name: way for experts in (False, True) for way in ways(experts, () if experts else ZEROS)}
HALF = WAYS["endor, 50 % zeros"]
ONE, TWO = "qwen2.5-coder-1.5b", "gemma3-270m"


def test_the_file_is_what_the_kept_results_say(tmp_path):
    for written, shipped in zip(write(tmp_path), (prices_file(), ranges_file()), strict=True):
        assert written.read_text() == shipped.read_text(), "run `python -m toolkit.planner.prices`"


def test_a_price_stands_in_its_kept_table():
    prices = load_prices()
    prices = prices[(prices["machine"] == ZEN4.name) & (prices["source"] == "endor/tab_perplexity")]
    price = prices[prices["model"] == "smollm2-135m"].set_index("treatment").loc["sparsegpt 2:4"]
    table = pd.read_csv(ZEN4 / "endor" / "tab_perplexity" / "table.csv").query(
        "metric == 'perplexity' and model == 'smollm2-135m'"
    )
    expected = table[(table["method"] == "sparsegpt") & (table["pattern"] == "2:4")]["value"].item()
    dense = table[(table["method"] == "dense") & (table["form"] == "fp16")]["value"].item()
    assert (price["perplexity"], price["dense_perplexity"]) == (float(DIGITS % expected), float(DIGITS % dense))
    assert (price["windows"], price["sequence_length"], price["bits"]) == (16, 1024, 9)


def test_each_way_has_a_treatment_that_can_be_measured_and_was():
    assert {way.treatment for way in WAYS.values()} == ALTERATIONS.keys() | EXACT
    assert set(load_prices()["treatment"]) == ALTERATIONS.keys()


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
        {"model": ONE, "perplexity": 20.0, "machine": "a", "source": "x"},
        {"model": ONE, "perplexity": 21.0, "machine": "b", "source": "x"},
        {"model": ONE, "perplexity": 19.0, "machine": "c", "source": "x"},
        {"model": ONE, "perplexity": 30.0, "machine": "a", "source": "y", "windows": 1},
        {"model": TWO, "perplexity": 11.0, "machine": "a", "source": "x"},
        {"model": TWO, "perplexity": 12.0, "machine": "a", "source": "y", "treatment": "gguf Q4_K", "bits": 5.53},
    ]
    table = pd.DataFrame([PRICE | row for row in rows])
    monkeypatch.setattr(planner_prices, "load_prices", lambda: table)
    monkeypatch.setattr(planner_prices, "_in_kept_results", planner_prices._in_kept_results.__wrapped__)  # nothing kept
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    return table


def embedded(name, **settings):
    """Without its file, which an empty cache lacks."""
    return Target(name, ARCHITECTURES["tinyllama-1.1b"], 2, True, **settings)


def test_the_price_is_the_models_own_or_that_of_most_text_with_the_range_over_machines(prices):
    target = open_target("llama2-7b")
    found = price_of(target, HALF)
    assert (found.ratio, found.low, found.high, found.model, found.bits) == (2.0, 1.9, 2.1, ONE, 9.5)
    own = price_of(replace(target, name=TWO), HALF)
    assert (own.ratio, own.model) == (1.1, TWO)
    assert isnan(price_of(target, WAYS["int8"]).ratio)  # nobody measured it
    four = WAYS["llama.cpp Q4_K"]
    assert isnan(price_of(target, four).ratio)
    assert price_of(target, four).model == f"– ({TWO}: 5.5 bits)"
    assert price_of(target, replace(four, bits=5.5)).ratio == 1.2
    for name in ("dense", "llama.cpp F16", "experts, 16 bits"):  # no weight changes
        assert price_of(target, WAYS[name]).ratio == 1


def test_measured_once_then_known(prices, monkeypatch):
    """Windows lose 0.2 nats with a standard error of 0.1."""
    calls = []

    def compared(settings, alterations):
        altered = alterations["sparsegpt 0.5"]
        calls.append((altered.method, altered.sparsity, settings.windows))
        return pd.DataFrame({"difference": [0, 0.2], "difference_error": [0, 0.1]})

    monkeypatch.setattr(treatments, "compared", compared)
    target = embedded("smollm2-135m")
    assert price_of(target, HALF).model == ONE
    found = price_of(target, HALF, measure=True)
    assert found.ratio == pytest.approx(exp(0.2))
    assert (found.low, found.high) == (pytest.approx(exp(0.1)), pytest.approx(exp(0.3)))
    assert found.model == "smollm2-135m"
    assert price_of(target, HALF) == price_of(target, HALF, measure=True) == found
    assert price_of(target, HALF, text="python-sources").model == ONE
    assert calls == [("sparsegpt", 0.5, 2)]


def test_a_gguf_file_is_known_without_reading_it(tmp_path, monkeypatch):
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(treatments, "file_sha256", lambda file: pytest.fail("read"))
    before = treatments.identity(str(file))
    assert before == treatments.identity(str(file))
    file.write_bytes(b"GGUF, another")
    assert treatments.identity(str(file)) != before
