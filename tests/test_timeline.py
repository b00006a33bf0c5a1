import math
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit import timeline
from toolkit.errors import UserError
from toolkit.kernels.engine.compiled import compiled
from toolkit.offload.overhead import SPAN
from toolkit.timeline import NEAREST, STAGES, Recorder, Span, Timeline, union_s


def spans():
    """Two operations, the second's read beside the first's copy and decode.

    read    ████████....          0–4, and 4–6
    copy    ........██            4–5
    decode            ██          5–6
    """
    return (
        Span("read", "fc1", "storage", 0.0, 4.0, nbytes=8_000_000_000, layer=0),
        Span("read", "fc2", "storage", 4.0, 6.0, nbytes=4_000_000_000, layer=0),
        Span("copy", "fc1", "dram", 4.0, 5.0, nbytes=8_000_000_000, layer=0),
        Span("decode", "fc1", "device", 5.0, 6.0, nbytes=16_000_000_000, layer=0),
    )


class Clock:
    """Gives 10, 11, 12, … so that a span of one body takes a second."""

    def __init__(self):
        self.now = 9.0

    def __call__(self):
        self.now += 1
        return self.now


def test_times_by_hand():
    timeline = Timeline(spans(), "modelled")
    assert timeline.total_s == 6
    assert [timeline.busy_s(stage) for stage in STAGES] == [6, 1, 1, 0, 0, 0, 0]
    assert timeline.busy_s() == timeline.busy_s("read", "copy") == 6


def test_a_breakdown_counts_each_instant_once():
    table = Timeline(spans(), "modelled").breakdown().set_index("stage")
    assert table["seconds"].to_dict() == {"decode": 1, "copy": 1, "read": 4}
    assert table["nbytes"].to_dict() == {"decode": 16e9, "copy": 8e9, "read": 12e9}
    assert table["share_percent"].sum() == pytest.approx(100)
    idle = Timeline(spans(), "modelled").window(0, 8).breakdown().set_index("stage")
    assert idle["seconds"].to_dict() == {"decode": 1, "copy": 1, "read": 4, "other": 2}
    assert Timeline((), "measured").breakdown().empty


def test_stages_by_hand():
    table = Timeline(spans(), "modelled").stages().set_index("stage")
    assert table["seconds"].to_dict() == {"read": 6, "copy": 1, "decode": 1, "transfer": 6, "total": 6}
    assert table["share_percent"].round(2).tolist() == [100, 16.67, 16.67, 100, 100]
    assert table.loc[["read", "copy", "decode"], "gb_s"].tolist() == [2, 8, 16]
    assert table.loc["transfer", "nbytes"] == 20_000_000_000
    assert set(table["evidence"]) == {"modelled"}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=12))
def test_a_union_is_the_seconds_that_any_interval_covers(drawn):
    intervals = [(start, start + length) for start, length in drawn]
    seconds = {second for start, end in intervals for second in range(start, end)}
    assert union_s(intervals) == len(seconds)


def test_a_span_that_cannot_be_is_refused():
    for change, names in (
        ({"stage": "load"}, "unknown stage 'load'"),
        ({"end_s": math.nan}, "start_s <= end_s"),
        ({"nbytes": -1}, "nbytes"),
    ):
        with pytest.raises(UserError, match=names):
            Span(**{"stage": "read", "op": "fc1", "tier": "storage", "start_s": 1.0, "end_s": 2.0} | change)


def test_the_recorder_times_its_bodies():
    recorder = Recorder(Clock())
    with recorder.span("read", "fc1", "storage", nbytes=5, layer=3), recorder.span("other", "rest", "dram"):
        pass
    assert recorder.timeline() == Timeline(
        (Span("other", "rest", "dram", 2.0, 3.0), Span("read", "fc1", "storage", 1.0, 4.0, 5, 3)), "measured"
    )


def test_a_compilation_is_no_part_of_the_span_that_waited_for_it(monkeypatch):
    """Beside a read of another thread.

    compute   ██cccccc██      0–2, and 8–10; of 2–8, one compilation holds another, 3–4
    read      .████████.      1–9
    """
    recorder, noted = Recorder(), []
    monkeypatch.setattr(timeline, "_compiled", noted)
    noted += [(threading.get_ident(), recorder._zero + start, recorder._zero + end) for start, end in ((3, 4), (2, 8))]
    noted.append((threading.get_ident(), recorder._zero - 5, recorder._zero - 4))  # before this recorder was made
    noted.append((-1, recorder._zero, recorder._zero + 9))  # another model's thread
    recorder.add(Span("compute", "fc1", "dram", 0.0, 10.0, nbytes=7))
    reader = threading.Thread(target=recorder.add, args=[Span("read", "fc2", "storage", 1.0, 9.0)])
    reader.start()
    reader.join()
    found = recorder.timeline()
    stages = found.stages().set_index("stage")
    assert stages["seconds"].round(9).to_dict() == {"read": 8, "compute": 4, "compile": 6, "transfer": 8, "total": 10}
    assert stages["share_percent"].round(9).max() == 100
    assert stages.loc["compute", "nbytes"] == 7
    parts = found.breakdown().set_index("stage")
    assert parts["seconds"].round(9).to_dict() == {"compile": 6, "compute": 4, "read": 0}
    assert [(stage, round(seconds, 9), nbytes) for stage, seconds, nbytes in recorder.nearest(0, 10)] == [
        ("compile", 6, 0),
        ("compute", 4, 7),
        ("read", 0, 0),
    ]
    assert parts["share_percent"].sum() == pytest.approx(100)


def test_a_kernel_s_first_call_is_compiled_in_a_stage_of_its_own():
    recorder, added = Recorder(), compiled(lambda first, second: first + second)
    for _ in range(2):
        with recorder.span("compute", "fc1", "dram"):
            assert added(1, 2) == 3
    found = recorder.timeline()
    whole_s = found.busy_s()
    assert [span.stage for span in found.spans].count("compile") == 1
    assert found.busy_s("compile") > 0.5 * whole_s > found.busy_s("compute")
    assert found.busy_s("compile") + found.busy_s("compute") == pytest.approx(whole_s)


@given(
    st.lists(st.tuples(st.sampled_from(STAGES), st.integers(0, 40), st.integers(0, 9), st.integers(0, 5)), max_size=12),
    st.integers(0, 20),
    st.integers(0, 30),
)
def test_the_parts_of_a_window_are_those_of_its_spans(drawn, first, length):
    """Against a count of each second: it belongs to the stage nearest to the result, or to none."""
    recorder, order = Recorder(Clock()), (*NEAREST, "other")
    for stage, start, seconds, kib in drawn:
        recorder.add(Span(stage, "fc1", "dram", start, start + seconds, 1024 * seconds * kib))
    expected = dict.fromkeys(order, 0)
    for second in range(first, first + length):
        under_way = {stage for stage, start, seconds, _ in drawn if start <= second < start + seconds}
        expected[next((stage for stage in order if stage in under_way), "other")] += 1
    moved = dict.fromkeys(order, 0)
    for stage, start, seconds, kib in drawn:
        moved[stage] += 1024 * kib * max(0, min(start + seconds, first + length) - max(start, first))
    found = recorder.nearest(first, first + length)
    assert {stage: seconds for stage, seconds, _ in found if seconds} == {s: n for s, n in expected.items() if n}
    assert {stage: nbytes for stage, _, nbytes in found if nbytes} == {s: n for s, n in moved.items() if n}
    assert found == recorder.timeline().window(first, first + length).nearest()


def test_a_long_text_s_spans_take_little_memory():
    """28 bytes each, until somebody asks for the timeline."""
    recorder, count = Recorder(), 100_000
    tracemalloc.start()
    for layer in range(count):
        recorder.record("read", "layer", "storage", 0.0, 1000, layer % 100)
    recorder.nearest(0, 1)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 28 * count <= held < 40 * count
    assert most < SPAN * count, most
    assert recorder.moved("read") == recorder.take_bytes("read") == 1000 * count
    assert recorder.timeline().spans == ()


def test_a_body_that_raises_leaves_no_span_and_its_error():
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), recorder.span("read", "fc1", "storage"):
        1 / 0  # noqa: B018 (the point)
    assert recorder.timeline().spans == ()


def test_threads_record_side_by_side():
    recorder, meet = Recorder(), threading.Barrier(4)

    def work(number: int) -> None:
        for layer in range(50):
            with recorder.span("read", f"op{number}", "storage", nbytes=1, layer=layer):
                if layer == 0:
                    meet.wait(10)  # all four spans are open at once

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline = recorder.timeline()
    assert sorted((s.op, s.layer) for s in timeline.spans) == [
        (f"op{n}", layer) for n in range(4) for layer in range(50)
    ]
    first = [s for s in timeline.spans if s.layer == 0]
    assert max(s.start_s for s in first) <= min(s.end_s for s in first)
    assert timeline.busy_s("read") <= timeline.total_s


def test_a_window_by_hand():
    """From 3.5 to 7: half a second of the first read, then all as it was, and nothing from 6 on."""
    window = Timeline(spans(), "modelled").window(3.5, 7.0)
    found = {(s.stage, s.op): (s.start_s, s.end_s, s.nbytes) for s in window.spans}
    assert found == {
        ("read", "fc1"): (0.0, 0.5, 1_000_000_000),
        ("read", "fc2"): (0.5, 2.5, 4_000_000_000),
        ("copy", "fc1"): (0.5, 1.5, 8_000_000_000),
        ("decode", "fc1"): (1.5, 2.5, 16_000_000_000),
        ("other", "pass"): (2.5, 3.5, 0),
    }
    assert window.evidence == "modelled"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=8), st.integers(0, 20), st.integers(0, 20))
def test_windows_are_filled_and_keep_what_falls_into_them(starts, begin, length):
    timeline = Timeline(tuple(Span("read", "a", "storage", s, s + n, nbytes=1000 * n) for s, n in starts), "measured")
    window = timeline.window(begin, begin + length)
    assert window.busy_s() == window.total_s == length
    seconds = [sum(s <= second < s + n for s, n in starts) for second in range(begin, begin + length)]
    assert window.busy_s("read") == sum(count > 0 for count in seconds)
    assert sum(span.nbytes for span in window.spans) == 1000 * sum(seconds)
