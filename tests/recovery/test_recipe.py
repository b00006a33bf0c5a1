"""The recipe on a toy model: shares worked through, folders written whole, and nothing done twice."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch

from toolkit.errors import UserError
from toolkit.models.adapters import FILE, merge
from toolkit.models.cutting import cut_for_good
from toolkit.recovery import card, sparse
from toolkit.recovery.__main__ import main
from toolkit.recovery.sparse import Recipe, recover
from toolkit.recovery.training import Training
from toolkit.sparsity import thresholds_of
from toolkit.sparsity.calibration import Calibration

TRAINING = Training(steps=3, batch=1, sequence_length=16, learning_rate=0.01, keep_every=1)
SMALL = Recipe("tiny", (0.7, 0.8), rank=2, down_rank=3, training=TRAINING, later_steps=2)


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sparse, "FITTED_ON", Calibration(windows=4, sequence_length=16))


@torch.no_grad()
def test_a_recipe_makes_folders_that_load(tiny, tokens, tmp_path):
    model = tiny("llama").requires_grad_(False)
    on = sparse.Evaluation(tokens, None, windows=2, sequence_length=16)
    dense = on.of(model)
    for made, expected in zip(recover(SMALL, model, tokens), (0.7, 0.8), strict=True):
        quality = on.table(model, dense, made)
        folder = tmp_path / SMALL.name(made.zeros)
        sparse.write(folder, model, SMALL, made, quality, on)
        assert made.zeros == expected
        assert quality["zeros"].iloc[2] == pytest.approx(expected, abs=0.1)
        again = tiny("llama")
        merge(again, folder / FILE)
        cut_for_good(again)
        found = sparse.Evaluation(tokens, None, 2, 16).of(again)
        assert found["perplexity"] == pytest.approx(quality["perplexity"].iloc[2], rel=1e-2)
        assert torch.equal(thresholds_of(again), made.adapters.thresholds)
        assert len(pd.read_csv(folder / card.CURVE)) == len(made.curve)
        text = (folder / card.CARD).read_text()
        assert f"# tiny-sparse{expected * 100:g}" in text
        assert ("after the\n  steps for lower shares of zeros" in text) == (expected == 0.8)  # 0.7 is the first share
    with pytest.raises(UserError, match="exists already"):
        sparse.write(folder, model, SMALL, made, quality, on)


def test_the_next_share_starts_from_the_last_ones_adapters_and_nothing_is_trained_twice(tiny, tokens, monkeypatch):
    model = tiny("llama").requires_grad_(False)
    first, second = recover(SMALL, model, tokens)
    assert [len(first.curve), len(second.curve)] == [3, 2]
    for name, low in first.adapters.differences.items():
        assert torch.equal(low.left, second.start.differences[name].left)
    assert (second.start.thresholds > first.adapters.thresholds).all()
    monkeypatch.setattr("toolkit.recovery.distillation.backward_divergence", None)
    for one, other in zip((first, second), recover(SMALL, model, tokens), strict=True):
        assert one.curve == other.curve
        assert torch.equal(one.adapters.thresholds, other.adapters.thresholds)


@torch.no_grad()
def test_a_recipe_goes_on_from_another_ones_adapters_with_another_activation(tiny, tokens, tmp_path):
    model = tiny("llama").requires_grad_(False)
    on = sparse.Evaluation(tokens, None, windows=2, sequence_length=16)
    first = replace(SMALL, zeros=(0.7,))
    (before,) = recover(first, model, tokens)
    sparse.write(tmp_path / "before", model, first, before, on.table(model, on.of(model), before), on)
    second = replace(first, zeros=(0.8,), start=str(tmp_path / "before"), activation="relu")
    (made,) = recover(second, model, tokens)
    for name, low in before.adapters.differences.items():
        assert torch.equal(made.start.differences[name].left, low.left.float())
    assert made.alone.differences == {}
    folder = tmp_path / second.name(0.8)
    assert folder.name == "tiny-relu-sparse80"
    quality = on.table(model, on.of(model), made)
    sparse.write(folder, model, second, made, quality, on)
    text = (folder / card.CARD).read_text()
    assert "`relu` takes the place" in text
    assert sparse.earlier(replace(second, start=str(folder))) == json.loads(
        json.dumps([first.record(), second.record()])
    )
    assert json.dumps(first.record()) in text
    assert second.record()["start"] == "before"
    again = tiny("llama")
    merge(again, folder / FILE)
    cut_for_good(again)
    assert again.config.hidden_act == "relu"
    assert on.of(again)["perplexity"] == pytest.approx(quality["perplexity"].iloc[2], rel=1e-2)


def test_the_command_refuses_before_work_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("toolkit.models.load_model", None)
    (tmp_path / "smollm2-135m-sparse80").mkdir()
    for arguments, told in (
        (["--out", str(tmp_path / "no")], "expected a folder that is there"),
        (["--out", str(tmp_path)], "exists already"),
        (["--out", str(tmp_path), "--corpus", "pile"], "unknown corpus 'pile'"),
        (["--out", str(tmp_path), "--zeros", "0.3"], "share of zeros 0.3"),
        (["--out", str(tmp_path), "--zeros", "0.7", "--evaluation-windows", "0"], "--evaluation-windows 0: expected 1"),
        (["--out", str(tmp_path), "--zeros", "0.7", "--task-limit", "0"], "--task-limit 0: expected 1 or more"),
        (["--out", str(tmp_path), "--zeros", "0.7", "--device", "cuda:99"], "torch sees no CUDA device"),
    ):
        assert main(["smollm2-135m", *arguments]) == 2
        assert told in capsys.readouterr().err
