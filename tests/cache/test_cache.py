import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time

import pandas as pd
import pytest

from toolkit import cache, sources
from toolkit.cache import cached, cached_table
from toolkit.errors import UserError
from toolkit.sweep import __main__ as sweep


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


def _drop_sum(folder, name):
    sums = json.loads((folder / "checksums.json").read_text())
    del sums[name]
    (folder / "checksums.json").write_text(json.dumps(sums))


def _add_sum(folder, name):
    sums = json.loads((folder / "checksums.json").read_text())
    (folder / "checksums.json").write_text(json.dumps(sums | {name: "0" * 64}))


def _make_pipe(file):
    file.unlink()
    os.mkfifo(file)


def _replace(folder, make):
    shutil.rmtree(folder)
    make()


FAULTS = {
    "a flipped bit": lambda folder: _flip(folder / "part" / "data.txt"),
    "a truncated file": lambda folder: (folder / "part" / "data.txt").write_text("soun"),
    "a missing file": lambda folder: (folder / "part" / "data.txt").unlink(),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "broken checksums": lambda folder: (folder / "checksums.json").write_text('{"part'),
    "foreign checksums": lambda folder: (folder / "checksums.json").write_text("[1]"),
    "empty checksums": lambda folder: (folder / "checksums.json").write_text("{}"),
    "deep checksums": lambda folder: (folder / "checksums.json").write_text("[" * 100_000),
    "checksums of the key alone": lambda folder: _drop_sum(folder, "part/data.txt"),
    "checksums without the key": lambda folder: _drop_sum(folder, "key.json"),
    "odd checksums": lambda folder: (folder / "checksums.json").write_text('{"key.json": [[1]], "part/data.txt": 2}'),
    "checksums of a file elsewhere": lambda folder: _add_sum(folder, "../../../../etc/hostname"),
    "checksums that are a pipe": lambda folder: _make_pipe(folder / "checksums.json"),
    "a pipe for a file": lambda folder: _make_pipe(folder / "part" / "data.txt"),
    "a deep key": lambda folder: (folder / "key.json").write_text("[" * 100_000),
    "an added file": lambda folder: (folder / "part" / "more.txt").write_text("more"),
    "a folder for a file": lambda folder: ((folder / "key.json").unlink(), (folder / "key.json").mkdir()),
    "a link that leads nowhere": lambda folder: _replace(folder, lambda: folder.symlink_to("nowhere")),
    "a link to itself": lambda folder: _replace(folder, lambda: folder.symlink_to(folder.name)),
    "a file for the folder": lambda folder: _replace(folder, lambda: folder.write_text("a file")),
    "an empty folder": lambda folder: _replace(folder, folder.mkdir),
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

    with pytest.raises(UserError, match=r"kind/.*: no space left.* TOOLKIT_CACHE_DIR"):
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


def test_links_at_the_names_that_the_cache_uses_are_not_followed(cache_folder):
    folder = cached("kind", {}, [], writer([]))
    precious = cache_folder / "precious"
    precious.mkdir()
    (precious / "work").write_text("of years")
    shutil.rmtree(folder)
    folder.symlink_to(precious)  # a whole folder, but none of ours
    folder.with_name(folder.name + ".partial").symlink_to(precious)
    assert cached("kind", {}, [], writer([])) == folder
    assert not folder.is_symlink()
    assert [file.name for file in precious.iterdir()] == ["work"]
    lock = folder.with_name(folder.name + ".lock")
    lock.unlink()
    lock.symlink_to(precious / "work")
    (folder / "part" / "data.txt").unlink()
    with pytest.raises(UserError, match=r"\.lock: a link is where"):
        cached("kind", {}, [], writer([]))
    assert (precious / "work").read_text() == "of years"


@pytest.mark.parametrize("kind", ["file", "dangling"])
@pytest.mark.parametrize("place", ["cache", "cache/kind"])
def test_a_cache_folder_that_is_none(tmp_path, monkeypatch, place, kind):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / place).parent.mkdir(exist_ok=True)
    if kind == "file":
        (tmp_path / place).write_text("mine")
    else:
        (tmp_path / place).symlink_to("nowhere")
    with pytest.raises(UserError, match=rf"{place}.*: .*; .*, or set TOOLKIT_CACHE_DIR to another folder$"):
        cached("kind", {}, [], writer([]))
    assert cache.shrink() == []


def test_a_cache_folder_that_is_a_link_to_one_is_used(tmp_path, monkeypatch):
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "link").symlink_to("large-disk")
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "link"))
    assert cached("kind", {}, [], writer(made := [])) == cached("kind", {}, [], writer(made))
    assert len(made) == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_sound_artefact_is_used_where_nothing_can_be_written(monkeypatch, code):
    made = []
    folder = cached("kind", {}, [], writer(made))
    really_open = os.open

    def refused(path, flags, *rest, **named):
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(code, os.strerror(code), str(path))
        return really_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(os, "utime", lambda *_: refused("", os.O_RDWR))
    assert cached("kind", {}, [], writer(made)) == folder
    assert len(made) == 1
    for key, fresh in (({"other": 1}, False), ({}, True)):
        with pytest.raises(UserError, match=r"kind/.*: .*, or set TOOLKIT_CACHE_DIR to another folder"):
            cached("kind", key, [], writer(made), fresh)
    (folder / "part" / "data.txt").write_text("altered")
    with pytest.raises(UserError, match=r"kind/.*: .*, or set TOOLKIT_CACHE_DIR to another folder"):
        cached("kind", {}, [], writer(made))


def test_a_fresh_table_replaces_the_kept_one_once_it_is_measured():
    def measure(value):
        return lambda: pd.DataFrame({"value": [value]})

    assert cached_table("kind", {}, [], measure(1))["value"].tolist() == [1]
    assert cached_table("kind", {}, [], measure(2))["value"].tolist() == [1]
    with pytest.raises(ZeroDivisionError):
        cached_table("kind", {}, [], lambda: pd.DataFrame({"value": [1 / 0]}), fresh=True)
    assert cached_table("kind", {}, [], measure(2))["value"].tolist() == [1]
    assert cached_table("kind", {}, [], measure(2), fresh=True)["value"].tolist() == [2]
    assert cached_table("kind", {}, [], measure(3))["value"].tolist() == [2]


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


def test_what_is_no_artefact_stays(cache_folder):
    (folder,) = fill([10])
    notes = cache_folder / "kind" / "notes-0123456789abcdef"
    notes.mkdir()
    (notes / "mine.txt").write_text("mine")
    (cache_folder / "kind" / "link-0123456789abcdef").symlink_to(notes)
    (cache_folder / "linked").symlink_to(cache_folder / "kind")
    (cache_folder / "file").write_text("mine")
    assert [one.folder for one in cache.shrink()] == [folder]
    assert (notes / "mine.txt").read_text() == "mine"
    assert (cache_folder / "kind" / "link-0123456789abcdef").is_symlink()


def _use(folder, ready):
    cached("kind", {"number": 0}, [], writer([]))
    ready.touch()
    time.sleep(60)


def test_what_a_process_uses_stays(tmp_path):
    first, second = fill([10, 10])
    user = multiprocessing.get_context("fork").Process(target=_use, args=(first, tmp_path / "ready"))
    user.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    assert [one.folder for one in cache.shrink()] == [second]
    os.kill(user.pid, signal.SIGKILL)
    user.join()
    assert [one.folder for one in cache.shrink()] == [first]
    used = cached("kind", {}, [], writer([]))  # by this process
    assert cache.shrink() == []
    assert used.is_dir()


def test_what_is_being_made_stays_and_remains_of_the_killed_go(tmp_path):
    worker = multiprocessing.get_context("fork").Process(target=_hung_make, args=(tmp_path / "started",))
    worker.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    cache.shrink()
    assert list(tmp_path.rglob("half"))
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    cache.shrink()
    assert list(tmp_path.rglob("half")) == []


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


def test_without_a_limit_nothing_goes_and_much_is_told(monkeypatch, caplog):
    fill([1000])
    assert caplog.messages == []
    monkeypatch.setattr(cache, "WARN_GB", 1e-6)
    folder = cached("kind", {"number": 2}, [], lambda folder: _write(folder, 1000))
    assert folder.is_dir()
    assert ["./papermill_runs.sh --clean 0" in message for message in caplog.messages] == [True]


def test_many_artefacts_in_use_do_not_use_up_the_descriptors(monkeypatch):
    monkeypatch.setattr(cache, "MOST_HELD", 5)
    for number in range(12):
        cached("kind", {"number": number}, [], writer([]))
    assert len(cache._held) <= 5


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
    for wrong in ("-1", "nan", "all"):
        assert sweep.main([f"--clean={wrong}"]) == 2
        expected = f"error: --clean {wrong}: expected the gigabytes that may stay, such as 20; 0 leaves nothing\n"
        assert capsys.readouterr().err == expected
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


@pytest.mark.parametrize("kind", ["file", "link", "open"])
def test_a_shelf_that_is_not_the_users_own_is_refused(cache_folder, kind):
    folder = cache.shelf("compiled", {})
    shutil.rmtree(folder)
    if kind == "open":
        folder.mkdir(0o755)
    elif kind == "file":
        folder.touch()
    else:
        (cache_folder / "elsewhere").mkdir(0o700)
        folder.symlink_to(cache_folder / "elsewhere")
    with pytest.raises(UserError, match=str(folder)):
        cache.shelf("compiled", {})


def test_a_shelf_below_a_folder_that_anyone_may_write_is_refused(cache_folder):
    """Somebody could put another folder in its place after it was looked at."""
    cache.shelf("compiled", {})
    cache_folder.chmod(0o777)
    with pytest.raises(UserError, match=f"{cache_folder}: anyone may exchange what it holds: chmod o-w"):
        cache.shelf("compiled", {})
    cache_folder.chmod(0o1777)  # where it is sticky, only the owner may, as in /tmp
    cache.shelf("compiled", {})


def test_a_file_is_hashed_again_only_when_it_changed(monkeypatch):
    made, hashed = [], []
    really = cache.file_sha256
    monkeypatch.setattr(cache, "file_sha256", lambda file: hashed.append(file.name) or really(file))
    folder = cached("kind", {}, [], writer(made))
    assert sorted(hashed) == ["data.txt", "key.json"]
    assert cached("kind", {}, [], writer(made)) == folder
    assert len(hashed) == 2
    data = folder / "part" / "data.txt"
    before = data.stat()
    data.write_text("SOUND")  # as long as before, and as old, but for the time of change, which nobody can set
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    cached("kind", {}, [], writer(made))
    assert hashed[2:3] == ["data.txt"]
    assert len(made) == 2
