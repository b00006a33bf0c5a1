"""Functions whose results are kept: what their keys hold, and when they run again."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from toolkit import sources
from toolkit.cache import KEY, kept, kept_folder
from toolkit.errors import UserError


@dataclass(frozen=True)
class Small:
    name: str
    ratio: float = 0.5


@dataclass(frozen=True)
class Large:
    name: str
    ratio: float = 0.5


@dataclass(frozen=True)
class Pair:
    one: Small
    sizes: tuple[int, ...]


def counted(**options):
    """A kept function of two arguments, and the list of what it was called with."""
    calls = []

    def table(first, second=2):
        calls.append((first, second))
        return pd.DataFrame({"call": [len(calls)]})

    table.__module__ = "toolkit.pattern"  # the tests' modules are no part of the package
    return kept("kind", **options)(table), calls


def keys(folder: Path) -> list[dict]:
    return [json.loads(file.read_text())["key"] for file in folder.rglob(KEY)]


def test_runs_once_for_the_same_arguments_however_they_are_given(cache_folder):
    table, calls = counted()
    assert [len(table(1)), len(table(1, 2)), len(table(first=1)), len(table(second=2, first=1))] == [1] * 4
    assert calls == [(1, 2)]
    assert keys(cache_folder) == [{"function": "counted.<locals>.table", "first": 1, "second": 2}]
    table(1, 3)
    assert calls == [(1, 2), (1, 3)]


def test_dataclasses_and_lists_are_written_out(cache_folder):
    table, calls = counted()
    table(Pair(Small("a"), (1, 2)), {"b": [None, True]})
    table(Pair(Small("a"), [1, 2]), {"b": (None, True)})
    assert len(calls) == 1
    small = {"Small": {"name": "a", "ratio": 0.5}}
    (key,) = keys(cache_folder)
    assert key["first"] == {"Pair": {"one": small, "sizes": [1, 2]}}
    assert key["second"] == {"b": [None, True]}
    assert any(it.is_dir() for it in (cache_folder / "kind").glob("a-0.5-*"))  # named after the values
    table(Large("a"))
    table(Small("a"))
    assert len(calls) == 3, "dataclasses of the same fields differ"


def test_a_value_that_does_not_tell_what_it_holds_is_refused():
    table, calls = counted()
    for value in (Path("x"), np.float32(1), {1: 2}, Small, {1, 2}, len, Small(Path("x"))):
        with pytest.raises(TypeError, match=r"^first(\.name)?="):
            table(value)
    assert calls == []


def test_a_key_adds_to_the_arguments_and_stands_for_some(cache_folder):
    table, calls = counted(key=lambda first: {"first": first.stem, "machine": "this"})
    table(Path("a/model.bin"))
    table(Path("b/model.bin"))
    assert calls == [(Path("a/model.bin"), 2)]
    assert keys(cache_folder) == [
        {"function": "counted.<locals>.table", "first": "model", "second": 2, "machine": "this"}
    ]


def test_code_is_that_of_the_module(monkeypatch):
    asked = []

    def dependencies(*modules: str, without=()) -> list[Path]:
        asked.append((modules, without))
        return [Path(sources.__file__)]

    monkeypatch.setattr(sources, "dependencies", dependencies)
    table, _ = counted(without=("toolkit.models.loading",))
    table(1)
    assert asked == [(("toolkit.pattern",), ("toolkit.models.loading",))]


def test_a_function_of_a_notebook_is_refused():
    def table() -> pd.DataFrame:
        return pd.DataFrame()

    table.__module__ = "__main__"
    with pytest.raises(UserError, match=r"__main__\..*table: a change of it would go unseen"):
        kept("kind")(table)()


def test_a_folder_is_filled_once(cache_folder):
    calls = []

    def trained(folder, setting: Mapping, rank: int = 8) -> None:
        """Train."""
        calls.append(rank)
        (folder / "weights").write_text(str(rank))

    trained.__module__ = "toolkit.pattern"
    trained = kept_folder("predictors")(trained)
    one, other = trained({"a": 1}), trained({"a": 1}, rank=4)
    assert trained({"a": 1}, 8) == one != other
    assert [(folder / "weights").read_text() for folder in (one, other)] == ["8", "4"]
    assert calls == [8, 4]
    assert trained({"a": 1}, fresh=True) == one
    assert calls == [8, 4, 8]
    assert (one.parent, trained.__doc__) == (cache_folder / "predictors", "Train.")
