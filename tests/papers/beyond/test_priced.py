"""Sizes and prices of a model's files; nothing is evaluated."""

from math import exp, prod, sqrt

import pandas as pd
import pytest

from tests.models.test_twins import TOYS
from toolkit.interchange.gguf import write_gguf
from toolkit.models import shapes
from toolkit.models.twins import twin_model
from toolkit.papers.beyond import priced
from toolkit.papers.beyond.priced import Texts, in_types, prices, sizes
from toolkit.sparsity import Calibration


@pytest.fixture
def files(monkeypatch, tmp_path):
    """A model's file in 16 bits, one in 8.5, and a folder of 1,000 bytes more than its embedding in 16 bits."""
    monkeypatch.setitem(shapes.SHAPES, "toy-llama", TOYS["toy-llama"])
    model = twin_model("toy-llama", 2)
    for kind in ("F16", "Q8_0"):
        write_gguf(model, tmp_path / f"{kind}.gguf", kind)
    embedding = prod(model.get_input_embeddings().weight.shape)
    (folder := tmp_path / "packed").mkdir()
    (folder / "shard").write_bytes(bytes(2 * embedding + 1000))
    return tmp_path, sum(weight.numel() for weight in model.parameters()) - embedding, embedding


def test_a_token_needs_no_embedding_that_lies_apart(files):
    folder, weights, embedding = files
    own, few_bits = folder / "F16.gguf", folder / "Q8_0.gguf"
    half, few, packed = (sizes(place, own) for place in (own, few_bits, folder / "packed"))
    assert half["dense_mb"] == 2 * weights / 1e6
    assert half["size_mb"] == own.stat().st_size / 1e6
    assert few["needed_mb"] == pytest.approx((few_bits.stat().st_size - 2 * embedding) / 1e6)  # it stays in 16 bits
    assert few["token_bits"] == pytest.approx(8e6 * few["needed_mb"] / weights)
    assert packed["needed_mb"] == 0.001
    assert packed["token_bits"] == 8000 / weights


def test_a_price_is_the_ratio_with_the_paired_error(monkeypatch, tmp_path):
    windows = {"own": [1.0, 2.0, 4.0], "few": [1.1, 2.2, 4.3]}
    monkeypatch.setattr(priced, "window_nll", lambda place, texts: pd.DataFrame({"a corpus": windows[place.name]}))
    found = prices({name: tmp_path / name for name in windows}, Texts(("a corpus",))).set_index("form")
    assert found.loc["own", ["relative", "relative_low", "relative_high"]].tolist() == [1, 1, 1]
    assert found.loc["few", "perplexity"] == pytest.approx(exp(7.6 / 3))
    error = 0.1 / sqrt(3)  # differences of 0.1, 0.2, 0.3
    expected = [exp(0.2), exp(0.2 - error), exp(0.2 + error)]
    assert found.loc["few", ["relative", "relative_low", "relative_high"]].tolist() == pytest.approx(expected)


def test_a_file_of_the_type_that_is_asked_for_stays_as_it_is(files):
    own = str(files[0] / "Q8_0.gguf")
    assert str(in_types(own, "Q8_0", Calibration())) == own
