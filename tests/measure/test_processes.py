"""Whole processes that take turns: stand-ins without a process, and a small real one in a memory cgroup."""

import itertools
import threading
from math import nan
from types import SimpleNamespace

import pytest
from gguf_files import CASES, write

from toolkit.errors import UserError
from toolkit.measure import processes
from toolkit.measure.llama_cpp_process import NoRoom
from toolkit.measure.memory_group import missing
from toolkit.measure.processes import (
    KILLED,
    RAN,
    REFUSED,
    LlamaCppRun,
    OurRun,
    ProcessContestant,
    ProcessText,
    _outcome_of_run,
    table,
    take_turns,
    tokens_within,
)

SAID = """opening packed
6 tokens in 3.0 s: the first after 0.50 s, then 2.00 a second; 4 layers in DRAM, 2 on disk (direct reads); 9 MB
  stage  seconds  share_percent  moved_mb
   read      1.0           40.0      60.0
peak 312 of 500 MB
"""


class StandIn(ProcessContestant):
    """Gives its speeds one after the other; notes the tokens that it was asked for."""

    def __init__(self, name, *speeds, verdict=RAN):
        self.name, self.speeds, self.verdict, self.asked = name, [*speeds], verdict, []

    def take(self, prompt, tokens, limit):
        """The next outcome."""
        self.asked.append(tokens)
        if self.verdict != RAN:
            return ProcessText(self.verdict, note="too small")
        return ProcessText(RAN, tokens, self.speeds.pop(0), 1.0, 2.0, 3.0, text=prompt)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """No other work disturbs the turns."""
    counters = SimpleNamespace(clock_s=0.0, busy_s=0.0, own_s=0.0, stolen_s=0.0)

    def read():
        counters.clock_s += 1
        return SimpleNamespace(**vars(counters))

    monkeypatch.setattr("toolkit.measure.disturbance.read_counters", read)


@pytest.mark.parametrize(
    ("speed", "most", "count"),
    [(0.0, 32, 4), (0.4, 32, 8), (1.0, 32, 16), (9.0, 20, 20), (0.1, 3, 3)],
)
def test_slow_contestants_make_fewer_tokens(speed, most, count):
    assert tokens_within(speed, most) == count


def test_contestants_take_turns_and_whoever_cannot_run_is_asked_once():
    order, fast, slow = [], StandIn("fast", 10, 30, 20), StandIn("slow", 0.5, 0.7, 0.6)
    refused = StandIn("refused", verdict=REFUSED)
    done = lambda turn: order.append(turn.name)  # noqa: E731
    rounds = take_turns([fast, slow, refused], 10**9, "a text", 3, 32, {"fast": 10.0, "slow": 9.0}, done)
    assert order == ["fast", "slow", "refused", "slow", "fast", "fast", "slow"]
    assert (fast.asked, slow.asked, refused.asked) == ([32, 32, 32], [32, 8, 8], [4])
    rows = table(rounds).set_index("way")
    assert rows.index.tolist() == ["fast", "slow", "refused"]
    assert rows.loc["fast", ["tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"]].tolist() == [20, 10, 30]
    assert rows.loc["slow", ["tokens_per_s", "tokens"]].tolist() == [0.6, 8]
    assert rows["verdict"].tolist() == [RAN, RAN, REFUSED]
    assert rows["text_hash"].tolist() == [ProcessText(RAN, text="a text").digest] * 2 + [""]
    assert rows.loc["refused", "note"] == "too small"
    assert (rows["turns"] == 3).all()


def test_a_first_turn_that_was_too_short_does_not_count():
    fast, slow = StandIn("fast", 9, 10, 12), StandIn("slow", 1.0, 1.1)
    rounds = take_turns([fast, slow], 10**9, "a text", 2, 32, turn_s=6)
    assert (fast.asked, slow.asked) == ([4, 32, 32], [4, 4])
    assert table(rounds)["tokens_per_s"].tolist() == [11, 1.05]


def test_disturbed_repetitions_are_taken_again(monkeypatch):
    loads = iter([0.0, 0.9, 0.0])  # of the three rounds: the second one is taken again
    way = StandIn("way", 1, 2, 3)
    monkeypatch.setattr(
        "toolkit.measure.disturbance.load_between",
        lambda start, end: SimpleNamespace(others_cores=next(loads), stolen_cores=0.0),
    )
    rounds = take_turns([way], 10**9, "a text", 2, expected={"way": 1.0})
    assert [turn.outcome.tokens_per_s for (turn,) in rounds] == [1, 3]


def test_the_numbers_that_run_prints_are_read():
    outcome = _outcome_of_run(SAID, "text", 2.0, 1.5)
    held = "4 layers in DRAM, 2 on disk (direct reads)"
    assert outcome == ProcessText(RAN, 6, 2.0, 2.5, 10.0, 312, 0.3, "text", held)
    assert _outcome_of_run(SAID.replace("read", "rest"), "", 2.0).read_mb == 0


@pytest.fixture
def rival(monkeypatch, tmp_path):
    """llama.cpp with three loads and a small file; `rival.calls` are those of `run_process`."""
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    calls = []

    def run_process(file, limit, load, prompt, tokens, most_s):
        calls.append((load, limit, tokens, most_s))
        if load == "repacked" and limit < 10**8:
            raise NoRoom("killed")
        if load == "broken":
            raise UserError("cannot run the file")
        speed = {"mapped": 2.0, "repacked": 3.0, "pinned": 2.2}[load]
        numbers = {"tokens_per_s": speed, "opened_s": 1.0, "read_bytes": 2000.0, "own_bytes": 3e6, "cpu_s": 0.5}
        return SimpleNamespace(**numbers, tokens=[7], text="", build="a build; AVX2")

    monkeypatch.setattr(processes, "run_process", run_process)
    monkeypatch.setattr(processes, "missing", lambda: None)
    found = LlamaCppRun("llama.cpp", file, lambda text: [1, 2], str, ("mapped", "repacked", "broken"))
    found.calls = calls
    return found


def test_llama_cpp_goes_on_with_its_fastest_load(rival, capsys):
    for limit, best in ((5 * 10**7, "mapped"), (10**9, "repacked")):
        first, second = rival.take("text", 8, limit), rival.take("text", 8, limit)
        assert first == second
        assert first.note == f"{best}, a build"
        assert (first.text, first.read_mb, first.peak_mb, first.cpu_s) == ("[7]", 0.002, 3.0, 0.5)
    tried = ["mapped", "repacked", "broken"]
    assert [call[0] for call in rival.calls] == [*tried, "mapped", "mapped", *tried, "repacked", "repacked"]
    assert [call[2] for call in rival.calls] == [4, 4, 4, 8, 8] * 2
    assert capsys.readouterr().err.splitlines()[:3] == [
        "llama.cpp, mapped: 2 tokens/s in a trial of 4",
        "killed",
        "cannot run the file",
    ]
    rival.loads = ("repacked",)
    assert rival.take("text", 8, 6 * 10**7).verdict == KILLED


def test_llama_cpp_goes_on_with_loads_near_the_fastest(rival):
    rival.loads = ("mapped", "pinned", "repacked")
    assert rival.take("text", 8, 10**9).tokens_per_s == 3.0
    assert rival.take("text", 8, 10**9).note == "repacked, a build"
    assert [call[0] for call in rival.calls[3:]] == ["pinned", "repacked"] * 2


def test_a_trial_as_long_as_a_turn_is_one(rival):
    assert rival.take("text", 4, 10**9).tokens_per_s == 3.0
    assert [call[2] for call in rival.calls] == [4, 4, 4]


def test_a_load_may_take_twice_as_long_as_the_fastest_one(rival, monkeypatch):
    clock = itertools.accumulate([0, 30, 0, 13, 0, 1])  # seconds at the begin and the end of each trial
    monkeypatch.setattr(processes, "time", SimpleNamespace(perf_counter=clock.__next__))
    rival.loads = ("pinned", "mapped", "repacked")
    rival.take("text", 4, 10**9)
    first, *most_s = [call[3] for call in rival.calls]
    assert first == threading.TIMEOUT_MAX
    assert most_s == [60.0, 26.0]


def test_a_rival_that_reads_less_than_its_limit_allows_is_not_counted(rival):
    """Its file has 0.4 MB of weights: pages of it are in memory that counts for somebody else."""
    outcome = rival.take("text", 8, 10_000)
    assert outcome.verdict == processes.FAILED
    assert "it read 0 MB a token. More does not fit into the limit" in outcome.note


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_file_runs_in_a_group_of_exactly_its_limit(tmp_path):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    ours = OurRun("as it is", file)
    few = ours.take("the he", 4, 20_000_000)
    assert (few.verdict, few.tokens) == (REFUSED, 0)
    assert "20 MB for the process is too small" in few.note
    assert few.tokens_per_s is nan
    ran = ours.take("the he", 4, 700_000_000)
    assert (ran.verdict, ran.tokens, ran.read_mb) == (RAN, 4, 0.0)
    assert 20 < ran.peak_mb < 700
    assert ran.tokens_per_s > 0
    assert ran.first_s > 0.1  # the imports are in it
    assert len(ran.digest) == processes.DIGEST
