"""The race of a model's ways: contestants that run no process, on a machine with round numbers."""

from math import isnan

import pandas as pd
import pytest

from tests.measure.test_processes import StandIn
from tests.planner.test_plan import machine
from tests.refusals import refused_command
from toolkit.__main__ import main
from toolkit.errors import UserError
from toolkit.measure.processes import KILLED
from toolkit.planner import bench as module
from toolkit.planner.bench import AS_IS, Contender, bench, named_way, names_of, race
from toolkit.planner.target import open_target
from toolkit.planner.ways import RIVAL

MB = 10**6
__all__ = ["machine"]


@pytest.fixture
def smol(machine, monkeypatch):
    """SmolLM2's file; a process takes 0.2 GB beside weights. Nothing is packed or run: our ways make 5 tokens/s."""
    asked = []

    def contestant(target, way, kv_type):
        asked.append(way.name)
        return StandIn(way.name, *[5.0] * 99)

    monkeypatch.setattr(module, "_contestant", contestant)
    monkeypatch.setattr(module, "rivals_of", lambda name, file: [StandIn(name, *[9.0] * 99)])
    monkeypatch.setattr("toolkit.planner.memory.present_bytes", lambda file, *way: 100 * MB)
    monkeypatch.setattr("toolkit.planner.plan.are_kept", lambda: True)
    return asked


def test_named_ways_and_llama_cpp_run_at_each_limit_beside_their_predictions(smol):
    seen = []
    found = bench("smollm2-135m", ["400MB", 200 * MB], ["as-is", "spqr-3-bits"], turns=2, tokens=8, done=seen.append)
    assert found["limit_mb"].tolist() == [200] * 3 + [400] * 3
    ours = ["as it is, Q4_1", "spqr, 3 bits"]
    assert found["way"].tolist() == [*ours, "llama.cpp, as it is, Q4_1"] * 2
    assert smol == ours
    assert len(seen) == 2 * 2 * 3
    assert all(len(rows) == 1 for rows in seen)
    rows = found.set_index(["limit_mb", "way"])
    assert rows.loc[(400, ours[0]), "predicted_per_s"] > rows.loc[(200, ours[0]), "predicted_per_s"]
    assert isnan(rows.loc[(200, ours[1]), "predicted_per_s"])  # it needs more
    assert (rows["relative"] == [1, rows["relative"].iloc[1], 1] * 2).all()
    assert 1 < rows.loc[(200, ours[1]), "relative_low"] < rows.loc[(400, ours[1]), "relative_high"]
    assert rows["rival"].tolist() == [False, False, True] * 2
    assert (rows["tokens_per_s"] == [5, 5, 9] * 2).all()
    assert {"tokens_per_s_low", "tokens_per_s_high", "peak_mb", "first_s", "text_hash"} <= set(rows)


def test_the_file_as_it_is_has_the_type_of_keys_and_values_that_is_asked_for():
    target = open_target("smollm2-135m")
    ours = module._contestant(target, names_of(target)[AS_IS], "q8_0")
    assert ours.options == ["--kv-type", "q8_0"]


def test_without_names_those_run_that_the_plan_names(smol):
    found = bench("smollm2-135m", "400MB", turns=1)
    plan = module.plan(open_target("smollm2-135m"), memory_bytes=400 * MB)
    assert set(found["way"]) == {choice.way for choice in plan.choices} | {"llama.cpp, as it is, Q4_1"}


def test_a_name_may_be_a_beginning():
    """The one with the lowest price is meant, then the fastest."""
    known = names_of(open_target("smollm2-135m"))
    assert known[AS_IS].name == "as it is, Q4_1"
    assert all(way.kind != RIVAL for way in known.values())
    rows = [("endor, 50 % zeros", 5.0, 2.0), ("endor, 50 % zeros, int8", 7.0, 2.001), ("endor, 70 % zeros", 9.0, 6.0)]
    table = pd.DataFrame(rows, columns=["way", "tokens_s", "relative"]).set_index("way")
    assert named_way("endor", known, [table]).name == "endor, 50 % zeros, int8"
    assert named_way("endor-50-zeros", known, [table]).name == "endor, 50 % zeros"
    assert named_way("spqr", known, [table]).name == "spqr, 3 bits"
    for name in ("end", "llama", ""):
        with pytest.raises(UserError, match="unknown way"):
            named_way(name, known, [table])


def test_a_way_that_is_killed_has_a_row(monkeypatch):
    monkeypatch.setattr("toolkit.measure.memory_group.missing", lambda: "no cgroups here")
    entries = [
        Contender(StandIn("ours", 3.0, 3.0), False, {}),
        Contender(StandIn("llama.cpp", verdict=KILLED), True, {}),
    ]
    found = race("a model", {MB: entries}, [MB], turns=1)
    assert found["verdict"].tolist() == ["ran", KILLED]
    assert isnan(found["tokens_per_s"][1])
    assert found["limited"].tolist() == [True, False]  # `run` keeps a limit of its own
    assert found["predicted_per_s"].isna().all()


def test_the_command_prints_rows_and_writes_table_and_plot(smol, tmp_path, capfd):
    files = ["--csv", str(tmp_path / "race.csv"), "--plot", str(tmp_path / "race.png")]
    command = ["bench", "smollm2-135m", "--memory", "400MB,250MB", "--ways", "as-is", "--turns", "2", *files]
    assert main([*command, "--tokens", "8", "--prompt", "the", "--kv-type", "q8_0"]) == 0
    printed = capfd.readouterr()
    assert "within 250 MB: 2 turns of as it is, Q4_1; llama.cpp, as it is, Q4_1" in printed.err
    lines = printed.out.splitlines()
    assert lines[0].split()[:3] == ["limit", "way", "tokens/s"]
    turns, _, medians = "\n".join(lines[1:]).partition("\nmedians of all turns\n")
    assert len(turns.strip().splitlines()) == 2 * 2 * 2
    first = medians.splitlines()[0]
    assert first.split()[:2] == ["250", "MB"]
    assert "as it is, Q4_1" in first
    assert "lossless" in first
    assert pd.read_csv(tmp_path / "race.csv")["tokens_per_s"].tolist() == [5, 9, 5, 9]
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smollm2-135m", "--memory", "1GB,0"], "--memory 0"),
        (["smollm2-135m", "--memory", "1GB", "--plot", "speed.txt"], "--plot speed.txt"),
        (["smollm2-135m", "--memory", "1GB", "--prompt", ""], "--prompt is empty"),
        (["smollm2-135m", "--memory", "1GB", "--ways", "as-is,gzip"], "unknown way 'gzip'"),
        (["llama2-7b", "--memory", "9GB"], "no weights of it are at hand"),
    ],
)
def test_bad_input_is_one_line(smol, capfd, arguments, words):
    refused_command(["bench", *arguments], words, capfd)


class Stopped(StandIn):
    """The user stops the race while it runs."""

    def take(self, prompt, tokens, limit):
        """No outcome."""
        raise KeyboardInterrupt


def test_an_interrupted_race_has_written_its_rows(smol, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "rivals_of", lambda name, file: [Stopped(name)])
    file = tmp_path / "new" / "race.csv"
    assert main(["bench", "smollm2-135m", "--memory", "400MB", "--ways", "as-is", "--csv", str(file)]) == 130
    assert pd.read_csv(file)["way"].tolist() == ["as it is, Q4_1"]


def test_a_refused_race_prints_no_header(smol, capfd):
    assert main(["bench", "no/such/model", "--memory", "9GB"]) == 2
    assert not capfd.readouterr().out
