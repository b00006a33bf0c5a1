import pytest
import torch

from tests.offload.conftest import pruned
from toolkit import paths
from toolkit.errors import UserError
from toolkit.measure import turns
from toolkit.measure.forward import METHODS, forward_measurements
from toolkit.measure.streamed import StreamedModel
from toolkit.pruning.calibration import Calibration
from toolkit.quantization import quantised
from toolkit.quantization.spqr import SpQR

SETTINGS = {"quantiser": SpQR(0.05), "calibration": Calibration(windows=2, sequence_length=16)}


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    words = torch.randint(0, 61, (64,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(quantised, "load_model", lambda name, dtype: (pruned(name).to(dtype), "tokenizer"))
    monkeypatch.setattr(quantised, "load_tokens", lambda corpus, tokenizer, split: words)
    monkeypatch.setattr(turns, "describe", lambda: {"cpu": "toy"})


def test_every_method_decodes_the_tokens_that_count_and_a_wrong_one_is_refused(monkeypatch):
    table = forward_measurements("llama", **SETTINGS, tokens=5, dropped=2, repetitions=2)
    assert (table["seconds"] > 0).all()
    rows = table.groupby("method", sort=False)
    assert list(rows.groups) == list(METHODS)
    for _, of in rows:
        assert of[["repetition", "token"]].to_numpy().tolist() == [
            [turn, token] for turn in (1, 2) for token in (2, 3, 4)
        ]
    nbytes = rows["linear_bytes"].first()
    assert nbytes["dense"] >= 2 * table["weights"].iloc[0] > nbytes["spqr_packed"]
    assert (rows["weight_bytes"].first() > nbytes).all()
    right = StreamedModel.token
    wrong = lambda self, number: right(self, number) + 10 * (self.way.method == "spqr_packed")  # noqa: E731
    monkeypatch.setattr(StreamedModel, "token", wrong)
    with pytest.raises(UserError, match="spqr_packed, pipelined, gives another output than dense weights"):
        forward_measurements("llama", **SETTINGS, tokens=3, dropped=2, repetitions=1)


def test_tokens_must_be_more_than_are_dropped():
    with pytest.raises(UserError, match="tokens=3, dropped=3"):
        forward_measurements("llama", **SETTINGS, tokens=3, dropped=3)
