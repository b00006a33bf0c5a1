"""The streamer alone: parts of layers, and the times that spans of reads tell."""

from concurrent.futures import Future

import pytest
import torch

from tests.offload.conftest import LAYERS
from toolkit.formats import decode
from toolkit.offload.budget import Budget
from toolkit.offload.plan import Plan
from toolkit.offload.streamer import Streamer
from toolkit.offload.ways import POLICIES, Way
from toolkit.storage.readers import Threads, open_reader
from toolkit.storage.runs import Layer
from toolkit.storage.store import Store
from toolkit.timeline import Recorder

READ_S, LATE_S = 1.0, 100.0


@pytest.fixture
def store(packed):
    return Store.open(packed("llama")[1])


def way(policy="sequential"):
    return Way("dense", policy=policy, device="cpu")


@pytest.mark.parametrize("policy", POLICIES)
def test_some_ops_of_each_layer_pass_through_the_slots(store, policy):
    layers = store.layers_of("dense")
    names = ("mlp.up_proj", "self_attn.q_proj")
    parts = [Layer({name: layer.ops[name] for name in names}) for layer in layers]
    budget, recorder = Budget("DRAM"), Recorder()
    plan = Plan(parts, ["dram"] + ["storage"] * (LAYERS - 1), way(policy))
    with open_reader("threads", store, "dense") as reader, Streamer(plan, reader, budget, recorder) as streamer:
        whole = Streamer(Plan(layers, ["storage"] * LAYERS, way()), reader, Budget("DRAM"), Recorder())
        for number in [*range(LAYERS), *range(LAYERS)]:
            found, expected = streamer.layer(number), whole.layer(number)
            assert list(found) == list(names)
            assert all(torch.equal(decode(found[name]), decode(expected[name])) for name in names)
        whole.close()
    table = recorder.timeline().table()
    assert set(table["nbytes"]) == {part.nbytes for part in parts[1:]}
    assert max(table["nbytes"]) < layers[0].nbytes


class Clock:
    """It stands still unless something takes its time."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Late(Threads):
    """Each read takes `READ_S`; whoever waits hears of its end `LATE_S` later."""

    clock = Clock()

    def _fetch(self, *arguments):
        super()._fetch(*arguments)
        self.clock.now_s += READ_S

    def submit(self, ranges, target, within=None):
        super().submit(ranges, target, within).result()
        self.clock.now_s += LATE_S
        done = Future()
        done.set_result(None)
        return done


def test_a_read_span_ends_with_the_read_and_not_when_somebody_hears_of_it(store):
    Late.clock = clock = Clock()
    recorder = Recorder(clock)
    plan = Plan(store.layers_of("dense"), ["storage"] * LAYERS, way())
    with Late(store.files("dense")) as reader, Streamer(plan, reader, Budget("DRAM"), recorder) as streamer:
        begun_s = clock.now_s
        for number in range(LAYERS):
            streamer.layer(number)
            assert len(recorder.timeline().spans) == number + 1  # known before the layer is used
    starts = [begun_s + number * (READ_S + LATE_S) for number in range(LAYERS)]
    assert [(span.start_s, span.end_s) for span in recorder.timeline().spans] == [(s, s + READ_S) for s in starts]


def test_a_read_that_waits_for_another_begins_when_that_one_has_ended(store):
    """Two reads are asked for at once; the reader does one after the other."""
    clock = Clock()

    class Slow(Threads):
        def _fetch(self, *arguments):
            super()._fetch(*arguments)
            clock.now_s += READ_S

    recorder = Recorder(clock)
    plan = Plan(store.layers_of("dense"), ["storage"] * LAYERS, way("pipelined"))
    with Slow(store.files("dense")) as reader, Streamer(plan, reader, Budget("DRAM"), recorder) as streamer:
        streamer.layer(0)
    spans = recorder.timeline().spans
    assert [(span.layer, span.start_s, span.end_s) for span in spans] == [(0, 0.0, READ_S), (1, READ_S, 2 * READ_S)]
