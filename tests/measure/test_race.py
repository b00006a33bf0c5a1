import pytest

from tests.measure.test_accelerate import resident_pages
from tests.models.test_twins import TOYS
from tests.notebook_code import functions_of
from toolkit.errors import UserError
from toolkit.measure import contestant as contestants
from toolkit.measure import race as races
from toolkit.measure.contestant import Decoding
from toolkit.measure.packed_model import PackedModel
from toolkit.measure.race import PLACED, Race, run_race
from toolkit.measure.summary import by_turn
from toolkit.models import shapes
from toolkit.models.workload import Workload
from toolkit.offload.linear import OffloadedLinear
from toolkit.offload.methods import ACCELERATE, METHODS
from toolkit.offload.ways import POLICIES, Way

LAYERS = TOKENS = 4


def placed(method, policy="sequential", mapping="storage"):
    return Way(method, policy=policy, device="cpu"), mapping


def pass_spans(layers, ways, repetitions, folder, tokens=TOKENS, **limit):
    return run_race(Race(Workload("toy-opt"), layers, ways, repetitions, tokens, **limit), folder)


EVERYONE = functions_of("endor/tab_e2e").paper_ways(("dense", "zstd", "endor", "endor_packed"))


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for name, layers in TOYS.items():
        monkeypatch.setitem(shapes.SHAPES, name, layers)


@pytest.fixture(scope="module")
def spans_of_turns(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "toy-opt", TOYS["toy-opt"])
        folder = tmp_path_factory.mktemp("turns")
        spans = pass_spans(LAYERS, EVERYONE, 1, folder)
        assert [*folder.iterdir()] == []
        return spans


def test_every_contestant_has_its_turns(spans_of_turns):
    turns = by_turn(spans_of_turns, PLACED)
    ways = {(way.method, way.policy, mapping, 1) for way, mapping in EVERYONE}
    assert set(turns[[*PLACED, "repetition"]].itertuples(index=False, name=None)) == ways
    assert (turns["seconds"] > 0).all()
    for turn in turns.itertuples():  # a layer's read may begin on either side of a window's end
        slack = 0 if turn.policy == "sequential" else turn.stored_bytes / LAYERS
        assert turn.read_bytes == pytest.approx(turn.stored_bytes, abs=slack)


def test_a_pass_moves_decodes_and_multiplies_what_its_map_says(spans_of_turns):
    dense_bytes = sum(rows * columns * 2 for rows, columns in TOYS["toy-opt"].values())
    for (method, policy, _, _), rows in spans_of_turns.groupby([*PLACED, "repetition"]):
        assert set(rows["tokens"]) == {TOKENS}
        moved = rows.groupby("stage")["nbytes"].sum() / TOKENS
        if method == ACCELERATE:
            assert LAYERS * dense_bytes < moved["read"] == rows["stored_bytes"].iloc[0]  # biases and norms as well
            continue
        stored = moved.get("read", 0) / max(rows["storage_layers"].iloc[0], 1)
        if policy == "sequential":
            assert moved.get("read", 0) == rows["stored_bytes"].iloc[0]
        if policy == "sequential" and method != "zstd":
            least = (1 if method == "dense" else 0.5625) * dense_bytes
            assert least <= stored <= least + 8192 * len(TOYS["toy-opt"])  # whole blocks
        decoded = METHODS[method].decoded_in is not None
        assert moved.get("decode", 0) == decoded * LAYERS * dense_bytes
        if method != "endor_packed":
            assert moved["compute"] == LAYERS * dense_bytes
        assert rows["dram_layers"].iloc[0] + rows["storage_layers"].iloc[0] == LAYERS


def test_wrong_logits_are_refused(tmp_path, monkeypatch):
    right = OffloadedLinear.forward
    monkeypatch.setattr(OffloadedLinear, "forward", lambda self, argument: right(self, argument) * 1.01)
    with pytest.raises(UserError, match="endor, pipelined, gives another output"):
        pass_spans(3, [placed("endor", "pipelined")], 1, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_second_token_that_would_read_nothing_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(races, "pack_model", None)  # packing would fail
    with pytest.raises(UserError, match="published: layers in storage: 2 of 3; its buffers keep 2"):
        pass_spans(3, [placed(ACCELERATE), placed("endor", "pipelined", "published")], 1, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_the_timed_token_finds_no_pages_where_reads_are_buffered(tmp_path, monkeypatch, o_direct):
    o_direct("refused")
    before, after, really = [], [], Decoding.token

    def cached() -> int:
        return sum(map(resident_pages, tmp_path.glob(".partial-*/store/layer-*")))

    def token(self, number):
        before.append(cached())
        output = really(self, number)
        after.append(cached())
        return output

    monkeypatch.setattr(Decoding, "token", token)
    spans = pass_spans(LAYERS, [placed("dense")], 1, tmp_path)
    assert set(spans["mode"]) == {"buffered"}
    if not after[1]:
        pytest.skip("this file system keeps no pages")
    assert before == [0] * (1 + TOKENS)


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_are_dropped_between_tokens(tmp_path, monkeypatch, o_direct, policy):
    """While the next layer is read, the clock runs: pages are dropped after the preparation, which is not timed."""
    o_direct("refused")
    events, token, prepare = [], Decoding.token, PackedModel.prepare
    monkeypatch.setattr(Decoding, "token", lambda *arguments: events.append("token") or token(*arguments))
    monkeypatch.setattr(PackedModel, "prepare", lambda self: events.append(prepare(self) or "prepared"))
    monkeypatch.setattr(contestants, "drop_pages", lambda path: events.append(path.name))
    pass_spans(LAYERS, [placed("endor", policy)], 1, tmp_path)
    shards = [f"layer-{number:03d}.endor.safetensors" for number in range(LAYERS)]
    before = [*shards, "prepared"] if policy == "sequential" else ["prepared", *shards]
    assert events == (1 + TOKENS) * [*before, "token"]


def test_a_limit_keeps_layers_in_memory(tmp_path):
    """Two buffers and about half of the 40 layers (9 MB) fit; the others are read for each token."""
    ours, limit = [placed("dense", "pipelined")], 8_000_000
    free = pass_spans(40, ours, 1, tmp_path, 1)
    spans = pass_spans(40, ours, 1, tmp_path, 1, memory_bytes=limit)
    assert set(spans["memory_bytes"]) == {limit}
    assert 0 < by_turn(spans, PLACED)["read_bytes"].min() < by_turn(free, PLACED)["read_bytes"].min()
