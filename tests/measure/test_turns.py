import pandas as pd
import pytest
import torch

from tests.measure.test_accelerate import resident_pages
from tests.models.test_twins import TOYS
from toolkit.errors import UserError
from toolkit.measure import turns
from toolkit.measure.accelerate import DiskOffloaded
from toolkit.measure.end_to_end import default_ways
from toolkit.measure.repetitions import timeline_of
from toolkit.measure.turns import PLACED, layer_maps, pass_spans, turn_seconds
from toolkit.models import shapes
from toolkit.models.workload import Workload
from toolkit.offload.linear import OffloadedLinear
from toolkit.policies.methods import ACCELERATE, METHODS
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way

LAYERS = 4


def placed(method, policy="sequential", mapping="storage"):
    return Way(method, policy=policy, device="cpu"), mapping


EVERYONE = default_ways(("dense", "zstd", "endor", "endor_packed"))


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for name, layers in TOYS.items():
        monkeypatch.setitem(shapes.SHAPES, name, layers)


@pytest.fixture(scope="module")
def spans_of_turns(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "toy-opt", TOYS["toy-opt"])
        folder = tmp_path_factory.mktemp("turns")
        spans = pass_spans(Workload("toy-opt"), LAYERS, EVERYONE, 2, folder)
        assert [*folder.iterdir()] == []
        return spans


def test_every_contestant_has_its_turns(spans_of_turns):
    seconds = turn_seconds(spans_of_turns)
    assert seconds.index.tolist() == [1, 2]
    assert set(seconds) == {(way.method, way.policy, mapping) for way, mapping in EVERYONE}
    assert (seconds > 0).all(axis=None)


def test_a_pass_moves_decodes_and_multiplies_what_its_map_says(spans_of_turns):
    dense_bytes = sum(rows * columns * 2 for rows, columns in TOYS["toy-opt"].values())
    for (method, policy, _, _), rows in spans_of_turns.groupby([*PLACED, "repetition"]):
        moved = rows.groupby("stage")["nbytes"].sum()
        if method == ACCELERATE:
            assert moved["read"] > LAYERS * dense_bytes  # embeddings, norms and head as well
            continue
        stored = moved.get("read", 0) / max(rows["storage_layers"].iloc[0], 1)
        if policy == "sequential" and method != "zstd":
            least = (1 if method == "dense" else 0.5625) * dense_bytes
            assert least <= stored <= least + 8192 * len(TOYS["toy-opt"])  # whole blocks
        decoded = METHODS[method].decoded_in is not None
        assert moved.get("decode", 0) == decoded * LAYERS * dense_bytes
        if method != "endor_packed":
            assert moved["compute"] == LAYERS * dense_bytes
        assert rows["dram_layers"].iloc[0] + rows["storage_layers"].iloc[0] == LAYERS


def test_stages_fill_a_pass_and_one_thing_at_a_time_when_sequential(spans_of_turns):
    for (_, policy, _, _), rows in spans_of_turns.groupby([*PLACED, "repetition"]):
        timeline = timeline_of(rows)
        assert timeline.busy_s() == pytest.approx(timeline.total_s)
        assert rows["start_s"].min() == 0
        if policy == "sequential":
            assert timeline.overlap_s < 0.2 * timeline.total_s


@pytest.mark.parametrize(("dtype", "sparsity"), [("bfloat16", 0.5), ("float32", 0.25)])
def test_other_families_and_types_give_the_right_logits(tmp_path, dtype, sparsity):
    spans = pass_spans(
        Workload("toy-llama", dtype, sparsity),
        3,
        [placed("endor", "pipelined"), placed(ACCELERATE)],
        1,
        tmp_path,
    )
    assert set(spans["method"]) == {"endor", ACCELERATE}


def test_turns_begin_with_another_contestant_each_time(spans_of_turns):
    first = [spans_of_turns[spans_of_turns["repetition"] == number].iloc[0][PLACED].tolist() for number in (1, 2)]
    assert first == [[way.method, way.policy, mapping] for way, mapping in EVERYONE[:2]]


@pytest.mark.parametrize("contestant", [placed("endor", "pipelined"), placed("dense"), placed(ACCELERATE)])
def test_wrong_logits_are_refused(tmp_path, monkeypatch, contestant):
    kind, attribute = (DiskOffloaded, "timed") if contestant[0].method == ACCELERATE else (OffloadedLinear, "forward")
    right = getattr(kind, attribute)

    def wrong(self, *arguments, **named):
        found = right(self, *arguments, **named)
        if kind is OffloadedLinear:
            return found * 1.01
        found[0].logits += 1
        return found

    monkeypatch.setattr(kind, attribute, wrong)
    with pytest.raises(UserError, match=f"{contestant[0].method}, {contestant[0].policy}, gives other logits"):
        pass_spans(Workload("toy-opt"), 3, [contestant], 1, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_packed_products_may_differ_by_rounding_and_no_more():
    expected = torch.tensor([[1.0, -2.0]])
    judge = turns.Turns(None, None, expected, {})
    judge.check(Way("endor_packed"), expected + 0.03)
    with pytest.raises(UserError, match="endor_packed"):
        judge.check(Way("endor_packed"), expected + 0.06)
    with pytest.raises(UserError, match="endor,"):
        judge.check(Way("endor"), expected + 1e-6)


def test_maps_by_hand():
    # 13 of 64 layers are near; 2 dense ones make room for 3 at 56.25 %
    assert layer_maps(10, 16, 9) == {
        "storage": LayerMap(0, 0, 10),
        "published": LayerMap(0, 2, 8),
        "refilled": LayerMap(0, 3, 7),
    }
    assert layer_maps(1, 16, 9)["published"] == LayerMap(0, 0, 1)


@pytest.mark.parametrize(
    ("contestant", "layers", "words"),
    [
        (placed("dense"), 1, "layers in storage: 1 of 1; its buffers keep 1"),
        (placed("endor", "pipelined"), 2, "layers in storage: 2 of 2; its buffers keep 2"),
        (placed("endor", "pipelined", "published"), 3, "published: layers in storage: 2 of 3; its buffers keep 2"),
    ],
)
def test_a_second_token_that_would_read_nothing_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, contestant, layers, words
):
    monkeypatch.setattr(turns, "pack_model", None)  # packing would fail
    with pytest.raises(UserError, match=words):
        pass_spans(Workload("toy-opt"), layers, [placed(ACCELERATE), contestant], 1, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_layers_are_placed_by_hand():
    """9 layers, 2 of them near; half as large once packed, they are 4, and 8 at a quarter."""
    refilled = placed("endor", "sequential", "refilled")
    assert turns.place_layers(*refilled, 9, 16, 8) == LayerMap(0, 4, 5)
    assert turns.place_layers(*refilled, 9, 16, 1) == LayerMap(0, 9, 0)  # none is read, nor should be
    with pytest.raises(UserError, match="layers in storage: 1 of 9"):
        turns.place_layers(*refilled, 9, 16, 4)
    assert turns.place_layers(*placed(ACCELERATE), 1) == LayerMap(0, 0, 1)  # it keeps nothing


@pytest.mark.parametrize("kind", ["refused", "ignored"])
def test_the_timed_token_finds_no_pages_where_reads_are_buffered(tmp_path, monkeypatch, o_direct, kind):
    o_direct(kind)
    before, after, really = [], [], turns._logits

    def cached() -> int:
        return sum(map(resident_pages, tmp_path.glob(".passes-*/store/layer-*")))

    def logits(model):
        before.append(cached())
        found = really(model)
        after.append(cached())
        return found

    monkeypatch.setattr(turns, "_logits", logits)
    spans = pass_spans(Workload("toy-opt"), LAYERS, [placed("dense")], 1, tmp_path)
    assert set(spans["mode"]) == {"buffered"}
    if not after[1]:
        pytest.skip("this file system keeps no pages")
    assert before[2] == 0  # of the token that is timed; the others are in memory, and the first one


@pytest.mark.parametrize(("kind", "dropped"), [("refused", LAYERS), (None, 0)])
def test_pages_are_dropped_between_tokens_unless_reads_pass_them_by(tmp_path, monkeypatch, o_direct, kind, dropped):
    if kind:
        o_direct(kind)
    events, really = [], turns._logits
    monkeypatch.setattr(turns, "_logits", lambda model: events.append("token") or really(model))
    monkeypatch.setattr(turns, "drop_pages", lambda path: events.append(path.name))
    spans = pass_spans(Workload("toy-opt"), LAYERS, [placed("endor", "pipelined")], 1, tmp_path)
    if not kind and set(spans["mode"]) != {"direct"}:
        pytest.skip("this file system knows no direct reads")
    shards = [f"layer-{number:03d}.endor.safetensors" for number in range(dropped)]
    assert events == ["token", "token", *shards, "token"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ({"method": "gzip"}, "unknown method 'gzip'"),
        ({"method": "dense", "policy": "random"}, "unknown policy 'random'"),
        ({"method": "dense", "mapping": "moon"}, "unknown mapping 'moon'"),
    ],
)
def test_unknown_names_are_refused(tmp_path, name, words):
    with pytest.raises(UserError, match=words):
        pass_spans(Workload("toy-opt"), 2, [placed(**name)], 1, tmp_path)


def test_turns_are_needed(tmp_path):
    with pytest.raises(UserError, match="repetitions=0"):
        pass_spans(Workload("toy-opt"), 2, [placed("dense")], 0, tmp_path)


def test_seconds_of_turns_by_hand():
    rows = [("dense", 1, 0.0, 2.0), ("dense", 1, 2.0, 3.0), ("endor", 1, 0.0, 1.0), ("dense", 2, 0.0, 5.0)]
    spans = pd.DataFrame(rows, columns=["method", "repetition", "start_s", "end_s"]).assign(
        policy="sequential", mapping="storage", stage="read", op="fc1", tier="storage", nbytes=1, layer=0
    )
    turns = turn_seconds(spans)
    assert turns["dense", "sequential", "storage"].tolist() == [3, 5]
    assert turns["endor", "sequential", "storage"].dropna().tolist() == [1]
