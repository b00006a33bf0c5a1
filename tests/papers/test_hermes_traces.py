"""Tables of Hermes's traces, from a few tokens by hand."""

import numpy as np
import pytest
import torch

from tests.notebook_code import functions_of
from toolkit.predictors import All, CopyLast, Nothing
from toolkit.sparsity.trace import Trace, pack

fig03, fig04, fig07 = (functions_of(f"hermes/{name}") for name in ("fig03", "fig04", "fig07"))
LABELS = {"trace": "by hand", "evidence": "measured"}


def trace_of(*layers):
    """A trace of one sequence; each layer is rows of 0 and 1, one a token."""
    active = [torch.tensor(layer, dtype=torch.bool)[None] for layer in layers]
    tokens = torch.zeros(1, active[0].shape[1], dtype=torch.int32)
    return Trace("toy", "by hand", tokens, tuple(one.shape[2] for one in active), tuple(map(pack, active)))


def quantities(table):
    return table[table["row"] == "quantity"].set_index("quantity")["value"]


def test_hot_and_cold_by_hand():
    """Neuron 0 makes 8 of 10 activations of five neurons, neurons 1 and 2 one each."""
    layer = np.zeros((8, 5), int)
    layer[:, 0], layer[0, 1], layer[1, 2] = 1, 1, 1
    table = fig03.hot_cold_table(trace_of(layer), LABELS)
    found = quantities(table)
    assert found["activation sparsity"] == pytest.approx(75)  # 30 of 40
    assert found["activations of the hot neurons"] == pytest.approx(80)  # one of five neurons is hot
    assert found["neurons of most activations"] == pytest.approx(20)
    curve = table[table["row"] == "curve"].set_index("neuron_share")["activation_share"]
    assert np.interp([0.2, 0.4, 0.6, 1], curve.index, curve).tolist() == pytest.approx([0.8, 0.9, 1, 1])
    assert set(table["model"]) == {"toy"}
    assert set(table["trace"]) == {"by hand"}


def test_similarity_by_hand():
    """Tokens use {0, 1}, {0, 2}, {0, 1}, {0, 2}: neighbours share a half, tokens two apart everything."""
    layer = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0]]
    found = fig04.similarity_table(trace_of(layer), [1, 2], LABELS).set_index("distance")
    assert found["value"].to_dict() == pytest.approx({1: 50, 2: 100})
    assert found["chance"].to_numpy() == pytest.approx(100 * (1 + 0.25 + 0.25) / 2)  # Σ usage² / Σ usage
    assert set(found["unit"]) == {"percent"}


def test_correlation_by_hand():
    """Neuron 0 of the second layer does what neuron 1 of the first does; neuron 1 fires by turns with it, once more."""
    generator = np.random.default_rng(0)
    first = generator.random((400, 3)) < 0.3
    second = np.stack([first[:, 1], first[:, 2] | (np.arange(400) % 10 == 0)], 1)
    table = fig04.correlation_table(trace_of(first, second), LABELS)
    pairs = table[table["row"] == "pair"].set_index("neuron")
    assert pairs["given"].to_dict() == {0: 1, 1: 1}
    assert pairs.loc[0, "usage"] == pytest.approx(first[200:, 1].mean())
    assert pairs.loc[1, "usage"] > pairs.loc[0, "usage"] - 0.1
    found = table[table["row"] == "quantity"].set_index("quantity")
    assert found.loc["fires with its parent", "value"] == 100
    assert found.loc["fires with its parent", "chance"] == pytest.approx(100 * pairs["usage"].mean())
    assert found.loc["pairs that are sure", "value"] == 100
    assert found.loc["pairs that are sure", "chance"] == 0


def test_quality_by_hand():
    """One of four neurons is active, always the same: nothing is right for 75 %, all for 25 %, a copy for 100 %."""
    layer = [[1, 0, 0, 0]] * 6
    kinds = {"nothing": [Nothing(4, 0)], "all": [All(4, 0)], "copy": [CopyLast(4, 0)]}
    found = fig07.quality_table(kinds, trace_of(layer), 2, LABELS).set_index("label")
    assert found["active"].tolist() == pytest.approx([0.25] * 3)
    assert found["accuracy"].tolist() == pytest.approx([0.75, 0.25, 1])
    assert found["predicted"].tolist() == pytest.approx([0, 1, 0.25])
    assert found["recall"].tolist() == pytest.approx([0, 1, 1])
    assert found["nbytes"].tolist()[:2] == [0, 0]
