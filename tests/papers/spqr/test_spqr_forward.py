"""Tokens of a real toy and of twins: every way runs in every place, and gives the same logits in all."""

import pytest
import torch

from tests.models.test_twins import TOYS
from tests.offload.conftest import pruned
from toolkit import paths
from toolkit.errors import UserError
from toolkit.measure import turns
from toolkit.measure.packed_model import PackedModel
from toolkit.models import shapes
from toolkit.papers.spqr.forward_pass import FORWARD, TWINS, ModelTwin, forward_measurements, twin_measurements
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity import Calibration, calibration, changed

TWIN, PLACES = ModelTwin("toy-llama", 3, 100), ("dram", "storage")
SETTINGS = {"quantiser": SpQR(0.05), "calibration": Calibration(windows=2, sequence_length=16)}


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    words = torch.randint(0, 61, (64,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(changed, "load_model", lambda name, dtype: (pruned(name).to(dtype), "tokenizer"))
    monkeypatch.setattr(calibration, "load_tokens", lambda corpus, tokenizer, split: words)
    monkeypatch.setitem(shapes.SHAPES, "toy-llama", TOYS["toy-llama"])
    monkeypatch.setattr(turns, "describe", lambda: {"cpu": "toy"})


def test_every_method_decodes_the_tokens_that_count_and_a_wrong_one_is_refused(monkeypatch):
    table = forward_measurements("llama", **SETTINGS, tokens=5, dropped=2, repetitions=2)
    assert (table["seconds"] > 0).all()
    rows = table.groupby("method", sort=False)
    assert list(rows.groups) == list(FORWARD)
    for _, of in rows:
        assert of[["repetition", "token"]].to_numpy().tolist() == [
            [turn, token] for turn in (1, 2) for token in (2, 3, 4)
        ]
    nbytes = rows["linear_bytes"].first()
    assert nbytes["dense"] >= 2 * table["weights"].iloc[0] > nbytes["spqr_packed"]
    assert (rows["weight_bytes"].first() > nbytes).all()
    right = PackedModel.token
    wrong = lambda self, number: right(self, number) + 10 * (self.way.method == "spqr_packed")  # noqa: E731
    monkeypatch.setattr(PackedModel, "token", wrong)
    with pytest.raises(UserError, match="spqr_packed, pipelined, gives another output than dense weights"):
        forward_measurements("llama", **SETTINGS, tokens=3, dropped=2, repetitions=1)


def test_every_way_runs_in_every_place_and_is_kept():
    table = twin_measurements(TWIN, list(TWINS), places=PLACES, tokens=4, repetitions=2)
    assert len(table) == len(TWINS) * len(PLACES) * 2
    assert (table["seconds"] > 0).all()
    bits = (8 * table.groupby("way")["layer_bytes"].first() / table["weights"].iloc[0]).to_dict()
    assert bits["dense"] == 16
    assert 8 < bits["int8"] < 10  # with a scale for each short row
    assert 4 < bits["spqr"] <= bits["spqr_ptcsr"] < 10
    again = twin_measurements(TWIN, list(TWINS), places=PLACES, tokens=4, repetitions=2)
    assert again["seconds"].tolist() == table["seconds"].tolist()
