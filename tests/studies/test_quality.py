"""Alterations of a tiny model: facts, rows, differences from the first by hand; the model is restored."""

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import pandas as pd
import pytest
import torch

from tests.studies.test_variants import TOKENS, tiny
from toolkit.quality import perplexity
from toolkit.studies import loaded, quality
from toolkit.studies.quality import AS_IS, Alteration, EvaluationSettings, compared, restored, window_nll

SETTINGS = EvaluationSettings("tiny", "text", sequence_length=16, windows=4)


@dataclass(frozen=True)
class Scaled(Alteration):
    factor: float

    @contextmanager
    def change(self, settings):
        head = quality.loaded(settings.model)[0].lm_head.weight
        facts = {"factor": self.factor}
        with restored([head]):
            head.mul_(self.factor)
            yield facts
        facts["seen"] = "afterwards"


@pytest.fixture
def model(monkeypatch, tmp_path, one_thread):
    made = tiny().requires_grad_(False)
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    for module in (quality, loaded):
        monkeypatch.setattr(module, "loaded", lambda name: (made, "tokenizer", "checksum"))
    monkeypatch.setattr(quality, "tokens_of", lambda *_: TOKENS)
    return made


def test_rows_of_an_altered_model(model, monkeypatch):
    on_tasks = pd.DataFrame({"task": ["a", "a"], "metric": ["acc", "acc_norm"], "value": [0.5, 0.25]})
    monkeypatch.setattr(quality, "evaluate_tasks", lambda *_: on_tasks)
    before = model.lm_head.weight.clone()
    table = quality.quality(replace(SETTINGS, tasks=("a",)), Scaled(0.5))
    assert torch.equal(model.lm_head.weight, before)
    model.lm_head.weight.mul_(0.5)
    expected = perplexity(model, TOKENS, 16, 4)
    assert table["metric"].tolist() == ["perplexity", "a", "a, by length", *["window nll"] * 4]
    assert table["value"][0] == pytest.approx(expected, rel=1e-9)
    assert table["standard_error"][0] == pytest.approx(expected.standard_error, rel=1e-6)
    assert window_nll(table) == pytest.approx(list(expected.window_nll), rel=1e-9)
    assert (table["factor"] == 0.5).all()
    assert (table["seen"] == "afterwards").all()
    assert set(quality.quality(SETTINGS)) == {*table} - {"factor", "seen"} | {"chance", "sequence_length"}


@dataclass(frozen=True)
class Counted(Scaled):
    facts_at_once: ClassVar[bool] = True
    begun: ClassVar[list[float]] = []

    @contextmanager
    def change(self, settings):
        self.begun.append(self.factor)
        with super().change(settings) as facts:
            yield facts


def test_perplexity_and_tasks_share_a_change_whose_facts_are_known_at_once(model, monkeypatch):
    before, judged = model.lm_head.weight.clone(), []

    def on_tasks(*_):
        judged.append(model.lm_head.weight.clone())
        return pd.DataFrame({"task": ["a"], "metric": ["acc"], "value": [0.5]})

    monkeypatch.setattr(quality, "evaluate_tasks", on_tasks)
    settings = replace(SETTINGS, tasks=("a",))
    table = quality.quality(settings, Counted(0.5))
    assert Counted.begun == [0.5]  # once for both
    assert torch.equal(judged[0], before * 0.5)
    assert torch.equal(model.lm_head.weight, before)
    pd.testing.assert_frame_equal(table, quality.quality(settings, Scaled(0.5)).drop(columns="seen"))
    quality.quality(SETTINGS, Counted(0.5))
    assert Counted.begun == [0.5, 0.5]
    assert torch.equal(model.lm_head.weight, before)


def test_two_are_compared_window_by_window(model):
    first, second = quality.quality(SETTINGS), quality.quality(SETTINGS, Scaled(0.5))
    found, values = quality.paired(first, second), zip(window_nll(first), window_nll(second), strict=True)
    assert found["value"] == pytest.approx(math.log(first["value"][0] / second["value"][0]))
    assert (found["items"], found["better_windows"]) == (4, sum(one < other for one, other in values))


def test_each_beside_the_first(model, monkeypatch):
    accuracies = iter([0.8, 0.7])

    def on_tasks(*_):
        return pd.DataFrame({"task": ["a"], "metric": ["acc"], "value": [next(accuracies)], "standard_error": [0.03]})

    monkeypatch.setattr(quality, "evaluate_tasks", on_tasks)
    table = compared(replace(SETTINGS, tasks=("a",)), {"own": AS_IS, "half": Scaled(0.5)})
    table = table.set_index(["variant", "metric"])
    own, half = (table.loc[(name, "perplexity")] for name in ("own", "half"))
    assert (own["difference"], own["relative"]) == (0, 1)
    assert half["relative"] == pytest.approx(half["value"] / own["value"])
    assert half["difference"] == pytest.approx(math.log(half["relative"]))
    assert table.loc[("half", "a"), "difference"] == pytest.approx(-0.1)
    assert table.loc[("half", "a"), "difference_error"] == pytest.approx(0.03 * math.sqrt(2))


def test_weights_are_restored_after_an_error(model):
    before = model.lm_head.weight.clone()
    with pytest.raises(ZeroDivisionError), Scaled(0.5).change(SETTINGS):
        raise ZeroDivisionError
    assert torch.equal(model.lm_head.weight, before)
