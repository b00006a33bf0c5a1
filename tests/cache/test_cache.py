import errno
import json
import logging
import multiprocessing
import os
import signal
import time

import pytest

from toolkit import cache, sources
from toolkit.cache import cached
from toolkit.errors import UserError


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    return tmp_path


def writer(made, content="sound"):
    def make(folder):
        made.append(folder)
        (folder / "part").mkdir()
        (folder / "part" / "data.txt").write_text(content)

    return make


def test_made_once_and_described(cache_folder):
    made = []
    first = cached("kind", {"method": "wanda", "sparsity": 0.5}, [], writer(made))
    second = cached("kind", {"sparsity": 0.5, "method": "wanda"}, [], writer(made))
    assert first == second
    assert len(made) == 1
    assert first.parent == cache_folder / "kind"
    assert first.name.startswith("wanda-0.5-")
    assert json.loads((first / "key.json").read_text())["key"] == {"method": "wanda", "sparsity": 0.5}
    assert cache.fault(first) is None


@pytest.mark.parametrize("other", [("kind", {"a": 2}), ("kind", {"a": 1, "b": None}), ("kind2", {"a": 1})])
def test_another_key_is_another_artefact(other):
    made = []
    assert cached("kind", {"a": 1}, [], writer(made)) != cached(*other, [], writer(made))
    assert len(made) == 2


def test_changed_code_makes_anew(monkeypatch):
    made, code = [], sources.dependencies("toolkit.cache")
    before = cached("kind", {}, code, writer(made))
    monkeypatch.setattr(sources, "fingerprint", lambda files: "changed")
    assert cached("kind", {}, code, writer(made)) != before


def _flip(file):
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


FAULTS = {
    "a flipped bit": lambda folder: _flip(folder / "part" / "data.txt"),
    "a truncated file": lambda folder: (folder / "part" / "data.txt").write_text("soun"),
    "a missing file": lambda folder: (folder / "part" / "data.txt").unlink(),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "broken checksums": lambda folder: (folder / "checksums.json").write_text('{"part'),
    "foreign checksums": lambda folder: (folder / "checksums.json").write_text("[1]"),
}


@pytest.mark.parametrize("harm", FAULTS.values(), ids=FAULTS.keys())
def test_a_harmed_artefact_is_made_anew_with_a_warning(harm, caplog):
    made = []
    folder = cached("kind", {}, [], writer(made))
    harm(folder)
    with caplog.at_level(logging.WARNING):
        assert cached("kind", {}, [], writer(made)) == folder
    assert len(made) == 2
    assert (folder / "part" / "data.txt").read_text() == "sound"
    assert str(folder) in caplog.text
    assert len(caplog.messages) == 1


class _DiskFull(Exception):
    """What a library in Rust raises: no errno, only words."""


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota"), _DiskFull("No space left on device (28)")]
)
def test_no_space_left_is_told_and_leaves_nothing(error, cache_folder):
    def make(folder):
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(UserError, match=r"no space left .* TOOLKIT_CACHE_DIR"):
        cached("kind", {}, [], make)
    assert [file for file in cache_folder.rglob("*") if file.suffix != ".lock" and file.is_file()] == []


def test_an_error_of_the_maker_passes_and_leaves_nothing(cache_folder):
    def make(folder):
        (folder / "half").write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached("kind", {}, [], make)
    assert list(cache_folder.rglob("half")) == []
    made = []
    cached("kind", {}, [], writer(made))
    assert len(made) == 1


def _slow_make(log):
    def make(folder):
        with open(log, "a") as lines:
            lines.write(f"{os.getpid()}\n")
        (folder / "half").write_text("half")
        time.sleep(0.5)
        (folder / "data").write_text("whole")

    cached("kind", {}, [], make)


def _hung_make(log):
    def make(folder):
        (folder / "half").write_text("half")
        log.touch()
        time.sleep(60)

    cached("kind", {}, [], make)


def test_two_processes_make_it_once(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_slow_make, args=(tmp_path / "log",)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len((tmp_path / "log").read_text().split()) == 1


def test_a_killed_maker_leaves_nothing_in_the_way(tmp_path):
    worker = multiprocessing.get_context("fork").Process(target=_hung_make, args=(tmp_path / "started",))
    worker.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert list(tmp_path.rglob("half"))
    made = []
    folder = cached("kind", {}, [], writer(made))
    assert len(made) == 1
    assert list(tmp_path.rglob("half")) == []
    assert cache.fault(folder) is None
