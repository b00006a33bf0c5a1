"""The recipe on a toy model: shares worked through, folders written whole, and nothing done twice."""

import json
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch

from toolkit.errors import UserError
from toolkit.models.adapters import FILE, load, merge
from toolkit.models.cutting import cut_for_good
from toolkit.recovery import sparse
from toolkit.recovery.__main__ import main
from toolkit.recovery.sparse import Recipe, make, recover
from toolkit.recovery.training import Training
from toolkit.sparsity import thresholds_of
from toolkit.sparsity.calibration import Calibration

TRAINING = Training(steps=3, batch=1, sequence_length=16, learning_rate=0.01, keep_every=1)
SMALL = Recipe("tiny", (0.7, 0.8), rank=2, down_rank=3, training=TRAINING, later_steps=2)


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sparse, "FITTED_ON", Calibration(windows=4, sequence_length=16))
    monkeypatch.setattr(sparse, "SEQUENCE_LENGTH", 16)


@pytest.fixture
def starts(monkeypatch):
    """The adapters that each training starts from."""
    found, distil = [], sparse.distil_sparse

    def seen(*arguments):
        found.append(arguments[3])
        return distil(*arguments)

    monkeypatch.setattr(sparse, "distil_sparse", seen)
    return found


@torch.no_grad()
def test_a_recipe_makes_folders_that_load(tiny, tokens, tmp_path):
    model = tiny("llama").requires_grad_(False)
    make(SMALL, tmp_path, model, [tokens, tokens], 2)
    made = recover(SMALL, model, tokens)
    for name, version, zeros in zip(SMALL.names(), made, SMALL.zeros, strict=True):
        folder = tmp_path / name
        quality = pd.read_csv(folder / "quality.csv").set_index("version")
        assert quality.loc["recovered", "zeros"] == pytest.approx(zeros, abs=0.1)
        assert quality.loc["dense", "relative"] == 1
        again = tiny("llama")
        merge(again, folder / FILE)
        cut_for_good(again)
        found = sparse.evaluated(again, tokens, 2)
        assert found["perplexity"] == pytest.approx(quality.loc["recovered", "perplexity"], rel=1e-2)
        assert torch.equal(thresholds_of(again), version.adapters.thresholds)
        assert len(pd.read_csv(folder / "curve.csv")) == len(version.curve)
        text = (folder / "README.md").read_text()
        assert f"# tiny-sparse{zeros * 100:g}" in text
        assert ("after the\n  steps for lower shares of zeros" in text) == (zeros == 0.8)  # 0.7 is the first share
        assert json.dumps(SMALL.record()) in text
    with pytest.raises(UserError, match="exists already"):
        make(SMALL, tmp_path, model, [tokens, tokens], 2)


def test_the_next_share_starts_from_the_last_ones_adapters_and_nothing_is_trained_twice(
    tiny, tokens, starts, monkeypatch
):
    model = tiny("llama").requires_grad_(False)
    first, second = recover(SMALL, model, tokens)
    assert [len(first.curve), len(second.curve)] == [3, 2]
    for name, low in first.adapters.differences.items():
        assert torch.equal(low.left, starts[1].differences[name].left)
    assert (starts[1].thresholds > first.adapters.thresholds).all()
    monkeypatch.setattr("toolkit.recovery.distillation.backward_divergence", None)
    for one, other in zip((first, second), recover(SMALL, model, tokens), strict=True):
        assert one.curve == other.curve
        assert torch.equal(one.adapters.thresholds, other.adapters.thresholds)


@torch.no_grad()
def test_a_recipe_goes_on_from_another_ones_adapters_with_another_activation(tiny, tokens, starts, tmp_path):
    model, first = tiny("llama").requires_grad_(False), replace(SMALL, zeros=(0.7,))
    make(first, tmp_path, model, [tokens, tokens], 2)
    second = replace(first, zeros=(0.8,), start=str(tmp_path / "tiny-sparse70"), activation="relu")
    assert second.record()["start"] == json.loads(json.dumps(asdict(first)))
    assert second.names() == ["tiny-relu-sparse80"]
    make(second, tmp_path, model, [tokens, tokens], 2)
    folder = tmp_path / "tiny-relu-sparse80"
    for name, low in load(tmp_path / "tiny-sparse70" / FILE, model).differences.items():
        assert torch.equal(low.left, starts[1].differences[name].left)
    assert "`relu` takes the place" in (folder / "README.md").read_text()
    again = tiny("llama")
    merge(again, folder / FILE)
    cut_for_good(again)
    assert again.config.hidden_act == "relu"
    recovered = pd.read_csv(folder / "quality.csv").set_index("version").loc["recovered", "perplexity"]
    assert sparse.evaluated(again, tokens, 2)["perplexity"] == pytest.approx(recovered, rel=1e-2)


def test_the_command_refuses_before_work_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("toolkit.models.load_model", None)
    (tmp_path / "smollm2-135m-sparse80").mkdir()
    for arguments, told in (
        (["--out", str(tmp_path / "no")], "expected a folder that is there"),
        (["--out", str(tmp_path)], "exists already"),
        (["--out", str(tmp_path), "--corpus", "pile"], "unknown corpus 'pile'"),
        (["--out", str(tmp_path), "--zeros", "0.3"], "share of zeros 0.3"),
        (
            ["--out", str(tmp_path), "--zeros", "0.7", "--evaluation-windows", "0"],
            "--evaluation-windows 0: expected more",
        ),
        (["--out", str(tmp_path), "--zeros", "0.7", "--later-steps", "0"], "--later-steps 0: expected more than 0"),
        (["--out", str(tmp_path), "--zeros", "0.7", "--device", "cuda:99"], "torch sees no CUDA device"),
    ):
        assert main(["smollm2-135m", *arguments]) == 2
        assert told in capsys.readouterr().err
