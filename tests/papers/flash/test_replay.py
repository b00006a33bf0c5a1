"""Tokens replayed by each way on a toy: what must be read follows from the trace and the shapes."""

import numpy as np
import pytest

from toolkit import paths
from toolkit.measure import turns
from toolkit.models import shapes
from toolkit.papers.flash.cost_model import SCHEMES
from toolkit.papers.flash.replay import Replay, replay_spans
from toolkit.papers.flash.twin_bundles import ATTENTION, neuron_shape, twin_bundles
from toolkit.storage.bundles import LAYOUTS

HIDDEN, NEURONS, LAYERS = 2048, 96, 3  # rows of whole blocks in fp16
ROW = 2 * HIDDEN
TOYS = {
    "toy-opt": {"q_proj": (8, HIDDEN), "fc1": (NEURONS, HIDDEN), "fc2": (HIDDEN, NEURONS)},
    "toy-llama": {
        "o_proj": (16, HIDDEN),
        "gate_proj": (NEURONS, HIDDEN),
        "up_proj": (NEURONS, HIDDEN),
        "down_proj": (HIDDEN, NEURONS),
    },
}


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    for name, layer in TOYS.items():
        monkeypatch.setitem(shapes.SHAPES, name, layer)
    monkeypatch.setattr(turns, "describe", lambda: {"cpu": "toy"})


def small(model="toy-opt", **given):
    return Replay(model, LAYERS, **{"active": 0.3, "new": 0.05, "window": 2, "tokens": 3, "depth": 2} | given)


@pytest.mark.parametrize(("model", "parts"), [("toy-opt", 2), ("toy-llama", 3)])
def test_every_way_reads_what_the_trace_needs(model, parts):
    replay = small(model)
    spans = replay_spans(replay)
    total = spans[spans["stage"] == "read"].groupby(["way", "repetition", "token"])[["nbytes"]].sum()
    whole = sum(rows * columns * 2 for rows, columns in TOYS[model].values()) * LAYERS
    stored = spans.groupby("way")["stored_bytes"].first()
    assert stored["naive"] == whole
    assert abs(stored["hybrid"] - whole / 2) <= LAYERS * parts * ROW
    for way in ("naive", "hybrid"):  # a layer is read ahead for the next token
        assert (abs(total.loc[way, "nbytes"] - stored[way]) <= stored[way] / LAYERS + 2).all()
    stages = spans.groupby("way")["stage"].agg(set)
    assert all(stages[way] >= {"read", "compute"} for way in SCHEMES)
    assert [way for way in SCHEMES if "manage" in stages[way]] == ["predictor", "windowing", "bundling"]
    held = spans.groupby("way")["held_bytes"].max()
    assert held["predictor"] < held["windowing"] == held["bundling"]
    trace, span = replay.trace(), replay.window + replay.tokens
    for repetition in (1, 2):
        first = (repetition - 1) * span
        for token in range(replay.tokens):
            at, token = first + replay.window + token, replay.window + token
            active = [trace.active(layer)[0].numpy() for layer in range(LAYERS)]
            needed = sum(one[at].sum() for one in active)
            start = max(first, at - replay.window)
            missing = sum((one[at] & ~one[start:at].any(0)).sum() for one in active)
            assert total.loc[("predictor", repetition, token), "nbytes"] == needed * parts * ROW
            for way in ("windowing", "bundling"):
                assert total.loc[(way, repetition, token), "nbytes"] == missing * parts * ROW


def test_layers_of_a_twin_differ_and_layouts_hold_the_same():
    store = twin_bundles("toy-llama", 2)
    store.verify()
    assert set(store.variants) == {*LAYOUTS, ATTENTION}
    assert neuron_shape("toy-llama") == (NEURONS, HIDDEN, True)

    def bundles(layer, layout):
        found = [
            store.shards[run.shard].content(run.offset, run.nbytes) for run in store.layer(layer, layout).ops.values()
        ]
        return np.concatenate([data.reshape(NEURONS, -1) for data in found], axis=1)

    assert (bundles(0, "bundled") == bundles(0, "split")).all()
    assert (bundles(1, "bundled") == np.roll(bundles(0, "bundled"), 1, axis=0)).all()
