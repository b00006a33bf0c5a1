import pytest
import torch

from tests.measure.test_accelerate import resident_pages
from tests.models.test_twins import TOYS
from toolkit.errors import UserError
from toolkit.measure import packed_model
from toolkit.measure import race as races
from toolkit.measure.contestant import Reference
from toolkit.measure.decoding import Decoding, Text
from toolkit.measure.packed_model import PackedModel
from toolkit.measure.race import PLACED, Race, run_race
from toolkit.measure.summary import by_turn
from toolkit.measure.turns import timeline_of
from toolkit.models import shapes
from toolkit.models.twins import twin_model
from toolkit.models.workload import Workload
from toolkit.offload.linear import OffloadedLinear
from toolkit.papers.endor.passes import default_ways
from toolkit.policies.methods import ACCELERATE, METHODS
from toolkit.policies.ways import POLICIES, Way

LAYERS = TOKENS = 4


def placed(method, policy="sequential", mapping="storage"):
    return Way(method, policy=policy, device="cpu"), mapping


def pass_spans(layers, ways, repetitions, folder, tokens=TOKENS, **limit):
    return run_race(Race(Workload("toy-opt"), layers, ways, repetitions, tokens, **limit), folder)


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
        spans = pass_spans(LAYERS, EVERYONE, 2, folder)
        assert [*folder.iterdir()] == []
        return spans


def test_every_contestant_has_its_turns(spans_of_turns):
    turns = by_turn(spans_of_turns, PLACED)
    ways = {(way.method, way.policy, mapping, turn) for way, mapping in EVERYONE for turn in (1, 2)}
    assert set(turns[[*PLACED, "repetition"]].itertuples(index=False, name=None)) == ways
    assert (turns["seconds"] > 0).all()


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


def test_stages_fill_a_pass_and_one_thing_at_a_time_when_sequential(spans_of_turns):
    for (_, policy, _, _), rows in spans_of_turns.groupby([*PLACED, "repetition"]):
        timeline = timeline_of(rows)
        assert timeline.busy_s() == pytest.approx(timeline.total_s)
        assert rows["start_s"].min() == 0
        if policy == "sequential":
            assert timeline.overlap_s < 0.2 * timeline.total_s


@pytest.mark.parametrize(("dtype", "sparsity"), [("bfloat16", 0.5), ("float32", 0.25)])
def test_other_families_and_types_give_the_right_logits(tmp_path, dtype, sparsity):
    ways = [placed("endor", "pipelined"), placed(ACCELERATE)]
    spans = run_race(Race(Workload("toy-llama", dtype, sparsity), 3, ways, 1), tmp_path)
    assert set(spans["method"]) == {"endor", ACCELERATE}


def test_rows_are_in_the_order_of_the_ways_whoever_began(spans_of_turns):
    for _, rows in spans_of_turns.groupby("repetition"):
        order = rows[PLACED].drop_duplicates().to_numpy().tolist()
        assert order == [[way.method, way.policy, mapping] for way, mapping in EVERYONE]


@pytest.mark.parametrize("contestant", [placed("endor", "pipelined"), placed("dense"), placed(ACCELERATE)])
def test_wrong_logits_are_refused(tmp_path, monkeypatch, contestant):
    kind, function = (Decoding, "token") if contestant[0].method == ACCELERATE else (OffloadedLinear, "forward")
    right = getattr(kind, function)
    monkeypatch.setattr(kind, function, lambda self, argument: right(self, argument) * 1.01)
    with pytest.raises(UserError, match=f"{contestant[0].method}, {contestant[0].policy}, gives another output"):
        pass_spans(3, [contestant], 1, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_packed_products_may_differ_by_rounding_and_no_more():
    expected = torch.tensor([[1.0, -2.0]])
    reference = Reference("the model in memory", [expected], near=0.02)
    reference.check("endor_packed", 0, expected + 0.03, exact=False)
    with pytest.raises(UserError, match="endor_packed gives another output than the model in memory"):
        reference.check("endor_packed", 0, expected + 0.06, exact=False)
    with pytest.raises(UserError, match="endor gives"):
        reference.check("endor", 0, expected + 1e-6)


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
    monkeypatch.setattr(races, "pack_model", None)  # packing would fail
    with pytest.raises(UserError, match=words):
        pass_spans(layers, [placed(ACCELERATE), contestant], 1, tmp_path)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("kind", ["refused", "ignored"])
def test_the_timed_token_finds_no_pages_where_reads_are_buffered(tmp_path, monkeypatch, o_direct, kind):
    o_direct(kind)
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
@pytest.mark.parametrize(("kind", "dropped"), [("refused", LAYERS), (None, 0)])
def test_pages_are_dropped_between_tokens_unless_reads_pass_them_by(
    tmp_path, monkeypatch, o_direct, kind, dropped, policy
):
    """While the next layer is read, the clock runs: pages are dropped after the preparation, which is not timed."""
    if kind:
        o_direct(kind)
    events, token, prepare = [], Decoding.token, PackedModel.prepare
    monkeypatch.setattr(Decoding, "token", lambda *arguments: events.append("token") or token(*arguments))
    monkeypatch.setattr(PackedModel, "prepare", lambda self: events.append(prepare(self) or "prepared"))
    monkeypatch.setattr(packed_model, "drop_pages", lambda path: events.append(path.name))
    spans = pass_spans(LAYERS, [placed("endor", policy)], 1, tmp_path)
    if not kind and set(spans["mode"]) != {"direct"}:
        pytest.skip("this file system knows no direct reads")
    shards = [f"layer-{number:03d}.endor.safetensors" for number in range(dropped)]
    before = [*shards, "prepared"] if policy == "sequential" else ["prepared", *shards]
    assert events == (1 + TOKENS) * [*before, "token"]


def test_unknown_names_are_refused(tmp_path):
    for name in ({"method": "gzip"}, {"method": "dense", "policy": "random"}, {"method": "dense", "mapping": "moon"}):
        *_, (kind, given) = name.items()
        with pytest.raises(UserError, match=f"unknown {kind} '{given}'"):
            pass_spans(2, [placed(**name)], 1, tmp_path)


def test_as_much_is_read_in_a_window_as_its_tokens_need(spans_of_turns):
    """A layer's read may begin on either side of a window's end; with one thing at a time nothing is left to chance."""
    for turn in by_turn(spans_of_turns, PLACED).itertuples():
        slack = 0 if turn.policy == "sequential" else turn.stored_bytes / LAYERS
        assert turn.read_bytes == pytest.approx(turn.stored_bytes, abs=slack)


def test_a_budget_is_the_contestants_limit_of_memory():
    text = Text([], Reference("the model in memory"))
    ours = PackedModel("ours", None, text, {}, dram_bytes=5_000)
    assert ours.memory == 5_000
    assert PackedModel("ours", None, text, {}).memory == float("inf")


def test_a_limit_holds_for_every_way_and_keeps_layers_in_memory(tmp_path):
    """Two buffers and about half of the 40 layers (9 MB) fit; the others are read for each token."""
    ours, limit = [placed("dense", "pipelined")], 8_000_000
    free = pass_spans(40, ours, 1, tmp_path, 1)
    spans = pass_spans(40, ours, 2, tmp_path, 1, memory_bytes=limit)
    assert set(spans["memory_bytes"]) == {limit}
    assert 0 < by_turn(spans, PLACED)["read_bytes"].min() < by_turn(free, PLACED)["read_bytes"].min()
    with pytest.raises(UserError, match=f"{ACCELERATE} cannot be given a limit"):
        pass_spans(LAYERS, [placed(ACCELERATE)], 1, tmp_path, memory_bytes=limit)


def test_passes_give_what_one_pass_over_all_tokens_gives():
    model = twin_model("toy-opt", 2, torch.float32)
    (text,) = races._texts(Race(Workload("toy-opt"), 2, (), prompt_tokens=4, tokens=3, batches=(2,)), model)
    assert [tuple(tokens.shape) for tokens in text.inputs] == [(2, 4), (2, 1), (2, 1)]
    with torch.no_grad():
        whole = model(torch.cat(text.inputs, 1)).logits
    for step, expected in text.reference._outputs.items():
        assert torch.allclose(whole[:, 3 + step], expected, atol=1e-5)
        if step < 2:
            assert torch.equal(expected.argmax(-1, keepdim=True), text.inputs[step + 1])


def test_a_text_that_is_too_long_for_the_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="a text of 282 tokens: expected no more than the model's 256"):
        pass_spans(3, [placed("dense")], 1, tmp_path, prompt_tokens=250, tokens=32)
