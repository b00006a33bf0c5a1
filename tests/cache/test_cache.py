import errno
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from functools import partial

import pandas as pd
import pytest

from tests.processes import wait_for
from toolkit import cache
from toolkit.cache import cached, cached_table
from toolkit.errors import UserError
from toolkit.sweep import __main__ as sweep

FORK = multiprocessing.get_context("fork")


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


def _replace(folder, make):
    shutil.rmtree(folder)
    make()


FAULTS = {
    "a truncated file": lambda folder: (folder / "part" / "data.txt").write_text("soun"),
    "a missing file": lambda folder: (folder / "part" / "data.txt").unlink(),
    "a broken key": lambda folder: (folder / "key.json").write_text('{"part'),
    "a link that leads nowhere": lambda folder: _replace(folder, lambda: folder.symlink_to("nowhere")),
    "a file for the folder": lambda folder: _replace(folder, lambda: folder.write_text("a file")),
    "an empty folder": lambda folder: _replace(folder, folder.mkdir),
}


def test_a_harmed_artefact_is_made_anew_with_a_warning(caplog):
    for number, harm in enumerate(FAULTS.values()):
        made = []
        folder = cached("kind", {"number": number}, [], writer(made))
        harm(folder)
        assert cached("kind", {"number": number}, [], writer(made)) == folder
        assert len(made) == 2
        assert (folder / "part" / "data.txt").read_text() == "sound"
        assert [str(folder) in message for message in caplog.messages] == [True]
        caplog.clear()


def test_an_error_of_the_maker_passes_and_leaves_nothing(cache_folder):
    def make(folder, error):
        (folder / "half").write_text("half")
        raise error

    full = OSError(errno.ENOSPC, "full")
    for error, told in ((ZeroDivisionError(), ZeroDivisionError), (full, UserError)):
        with pytest.raises(told):
            cached("kind", {}, [], partial(make, error=error))
    assert list(cache_folder.rglob("half")) == []
    made = []
    cached("kind", {}, [], writer(made))
    assert len(made) == 1


def _make_slowly(log, seconds):
    def make(folder):
        (folder / "half").write_text("half")
        with open(log, "a") as lines:
            lines.write(f"{os.getpid()}\n")
        time.sleep(seconds)

    cached("kind", {}, [], make)


def _use(ready):
    cached("kind", {"number": 0}, [], writer([]))
    ready.touch()
    time.sleep(60)


def started(work, log, *more):
    """A process that has begun its work, which is to write `log`."""
    process = FORK.Process(target=work, args=(log, *more))
    process.start()
    wait_for(log, process)
    return process


def test_two_processes_make_it_once(tmp_path):
    workers = [FORK.Process(target=_make_slowly, args=(tmp_path / "log", 0.5)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len((tmp_path / "log").read_text().split()) == 1


def test_a_killed_maker_leaves_nothing_in_the_way(tmp_path):
    worker = started(_make_slowly, tmp_path / "started", 60)
    cache.shrink()
    assert list(tmp_path.rglob("half")), "what is being made stays"
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert list(tmp_path.rglob("half"))
    made = []
    folder = cached("kind", {}, [], writer(made))
    assert len(made) == 1
    assert list(tmp_path.rglob("half")) == []
    assert (folder / "part" / "data.txt").read_text() == "sound"


def test_a_whole_artefact_is_used_where_nothing_can_be_written(monkeypatch):
    made = []
    folder = cached("kind", {}, [], writer(made))
    really_open = os.open

    def refused(path, flags, *rest, **named):
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(os, "utime", lambda *_: refused("", os.O_RDWR))
    assert cached("kind", {}, [], writer(made)) == folder
    assert len(made) == 1
    for key, fresh in (({"other": 1}, False), ({}, True)):
        with pytest.raises(UserError, match=r"kind/.*: .*, or set TOOLKIT_CACHE_DIR to another folder"):
            cached("kind", key, [], writer(made), fresh)


def test_a_fresh_table_never_takes_the_kept_one_from_a_reader(caplog):
    """Readers and writers of one table at once: every reader finds a whole one."""
    faults = []

    def work(number):
        try:
            for value in range(10):
                table = cached_table("kind", {}, [], lambda v=value: pd.DataFrame({"value": [v]}), fresh=number == 0)
                assert len(table) == 1
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert caplog.messages == []


def fill(sizes):
    """Artefacts of so many bytes, used one after the other and no longer in use."""
    folders = []
    for number, nbytes in enumerate(sizes):
        folders.append(cached("kind", {"number": number}, [], lambda folder, n=nbytes: _write(folder, n)))
        os.utime(folders[-1], (1000 + number, 1000 + number))
    for folder in folders:
        cache._let_go(folder)
    return folders


def _write(folder, nbytes):
    (folder / "data").write_bytes(bytes(nbytes))


def test_those_used_longest_ago_go_first(cache_folder):
    first, second, third = fill([30_000, 30_000, 30_000])
    cached("kind", {"number": 0}, [], writer([]))  # used again
    cache._let_go(first)
    removed = cache.shrink(61_500)
    assert [one.folder for one in removed] == [second]
    assert removed[0].nbytes == pytest.approx(30_300, abs=300)
    assert first.is_dir()
    assert third.is_dir()
    assert [one.folder for one in cache.shrink()] == [third, first]
    assert list((cache_folder / "kind").iterdir()) == []
    assert cache.shrink() == []


def test_what_a_process_uses_stays(tmp_path):
    first, second = fill([10, 10])
    user = started(_use, tmp_path / "ready")
    assert [one.folder for one in cache.shrink()] == [second]
    os.kill(user.pid, signal.SIGKILL)
    user.join()
    assert [one.folder for one in cache.shrink()] == [first]
    used = cached("kind", {}, [], writer([]))  # by this process
    assert cache.shrink() == []
    assert used.is_dir()


def test_the_limit_that_the_user_sets(monkeypatch, caplog):
    first, second = fill([400_000, 400_000])
    monkeypatch.setenv(cache.LIMIT, "0.001")
    third = cached("kind", {"number": 3}, [], lambda folder: _write(folder, 400_000))
    assert not first.exists()
    assert second.is_dir()
    assert third.is_dir()
    assert [f"removed {first}" in message for message in caplog.messages] == [True]
    larger = cached("kind", {"number": 4}, [], lambda folder: _write(folder, 1_200_000))
    assert larger.is_dir()  # the newest stays, even if it is too large by itself
    monkeypatch.setenv(cache.LIMIT, "a lot")
    with pytest.raises(UserError, match="TOOLKIT_CACHE_GB=a lot: expected a number of gigabytes"):
        cached("kind", {"number": 5}, [], lambda folder: pytest.fail("made"))


def test_clean_says_what_went_and_how_much(cache_folder, capsys):
    first, second = fill([2_000_000, 1_000_000])
    assert sweep.main(["--clean", "0.0015"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["removed", "2.0", "MB", str(first)]
    assert told[1:] == [f"1 removed, 2.0 MB freed; 1 left in {cache_folder}, 1.0 MB"]
    used = cached("kind", {"number": 5}, [], lambda folder: _write(folder, 3_000_000))
    assert sweep.main(["--clean", "0"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["removed", "1.0", "MB", str(second)]
    assert told[1].endswith(f"1 left in {cache_folder}, 3.0 MB; what a running process uses stays")
    assert used.is_dir()
    assert sweep.main(["--clean=nan"]) == 2
    assert "--clean nan: " in capsys.readouterr().err
    assert sweep.main(["--clean"]) == 2  # nothing goes by a slip
    assert used.is_dir()


def test_a_shelf_is_private_and_goes_with_the_rest(cache_folder):
    folder = cache.shelf("compiled", {"sources": "a"})
    assert folder == cache.shelf("compiled", {"sources": "a"}) != cache.shelf("compiled", {"sources": "b"})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert json.loads((folder / "key.json").read_text()) == {"sources": "a"}
    (folder / "kernel").write_bytes(bytes(1000))
    (mine,) = (one for one in cache.artefacts() if one.folder == folder)
    assert mine.nbytes > 1000
    assert cache.shrink() == []  # this process uses it
    cache._let_go(folder)
    assert [one.folder for one in cache.shrink()] == [folder]


def test_a_new_shelf_ends_those_unused_for_long():
    old, recent = (cache.shelf("compiled", {"sources": name}) for name in ("old", "recent"))
    other = cache.shelf("others", {"sources": "old"})
    for folder in (old, other):
        os.utime(folder, (0, 0))
        cache._let_go(folder)
    cache.shelf("compiled", {"sources": "new"})
    assert not old.exists()
    assert recent.is_dir()
    assert other.is_dir()


def test_a_shelf_that_others_could_write_is_refused(cache_folder):
    """Also one below a folder that anyone may write: somebody could put another folder in its place."""
    folder = cache.shelf("compiled", {})
    folder.chmod(0o755)
    with pytest.raises(UserError, match=f"{folder} is open to others"):
        cache.shelf("compiled", {})
    folder.chmod(0o700)
    cache_folder.chmod(0o777)
    with pytest.raises(UserError, match=f"{cache_folder}: anyone may exchange what it holds: chmod o-w"):
        cache.shelf("compiled", {})
    cache_folder.chmod(0o1777)  # where it is sticky, only the owner may, as in /tmp
    cache.shelf("compiled", {})
