"""Twins run in every way and place, with the same logits from the disk as from memory."""

import pytest

from tests.models.test_twins import TOYS
from toolkit import paths
from toolkit.errors import UserError
from toolkit.measure import turns
from toolkit.measure.streamed import StreamedModel
from toolkit.measure.twin_forward import PLACES, WAYS, ModelTwin, twin_measurements
from toolkit.models import shapes

TWIN = ModelTwin("toy-llama", 3, 100)


@pytest.fixture(autouse=True)
def toys(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setitem(shapes.SHAPES, "toy-llama", TOYS["toy-llama"])
    monkeypatch.setattr(turns, "describe", lambda: {"cpu": "toy"})


def test_every_way_runs_in_every_place_and_is_kept():
    table = twin_measurements(TWIN, list(WAYS), places=PLACES, tokens=4, repetitions=2)
    assert len(table) == len(WAYS) * len(PLACES) * 2
    assert (table["seconds"] > 0).all()
    bits = (8 * table.groupby("way")["layer_bytes"].first() / table["weights"].iloc[0]).to_dict()
    assert bits["dense"] == 16
    assert 8 < bits["int8"] < 10  # with a scale for each short row
    assert 4 < bits["spqr"] <= bits["spqr_ptcsr"] < 10
    again = twin_measurements(TWIN, list(WAYS), places=PLACES, tokens=4, repetitions=2)
    assert again["seconds"].tolist() == table["seconds"].tolist()


def test_layers_that_are_alike_share_their_weights_and_have_their_own_codes():
    table = twin_measurements(ModelTwin("toy-llama", 3, 100, alike=True), ["spqr"], tokens=4, repetitions=1)
    assert len(table) == 1


def test_other_logits_from_the_disk_are_refused(monkeypatch):
    really = StreamedModel.token
    monkeypatch.setattr(StreamedModel, "token", lambda self, number: really(self, number) + (self.nbytes > 0))
    with pytest.raises(UserError, match="spqr_packed, pipelined, gives another output than the same weights"):
        twin_measurements(TWIN, ["spqr"], places=PLACES, tokens=4, repetitions=1)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"ways": ["int2"]}, "unknown way 'int2'"),
        ({"ways": ["spqr"], "rivals": ["llama.cpp Q1"]}, "unknown way 'llama.cpp Q1'"),
        ({"ways": ["spqr"], "places": ["tape"]}, "unknown way 'tape'"),
        ({"ways": ["spqr"], "tokens": 3}, "tokens=3, repetitions=3: expected 4 or more, and 1 or more"),
        ({"ways": ["spqr"], "repetitions": 0}, "repetitions=0"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(named, told):
    with pytest.raises(UserError, match=told):
        twin_measurements(TWIN, **named)
