"""Who may write a folder, and what is left when a writer is stopped."""

import errno
import multiprocessing
import os
import signal
import time

import pytest

from tests.storage.conftest import make_ops, names
from toolkit import files
from toolkit.errors import UserError
from toolkit.storage.writing import write_store


def test_a_folder_that_is_there_is_never_touched(tmp_path):
    (tmp_path / "s").mkdir()
    for target in ("s", "file", "link"):
        if target == "file":
            (tmp_path / target).write_text("mine")
        if target == "link":
            (tmp_path / target).symlink_to("nowhere")
        with pytest.raises(UserError, match="exists already"):
            write_store(tmp_path / target, make_ops())
    assert names(tmp_path) == ["file", "link", "s"]
    assert names(tmp_path / "s") == []


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path):
    def slow():
        yield from make_ops(1)
        (tmp_path / "s").mkdir()

    with pytest.raises(UserError, match="exists already"):
        write_store(tmp_path / "s", slow())
    assert names(tmp_path) == ["s"]
    assert names(tmp_path / "s") == []


def test_no_place_to_write(tmp_path):
    with pytest.raises(UserError, match=r"no folder .*nowhere to write s into"):
        write_store(tmp_path / "nowhere" / "s", make_ops())


def test_a_place_where_one_may_not_write(tmp_path, monkeypatch):
    def refused(path, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.Path, "mkdir", refused)
    with pytest.raises(UserError, match="cannot write to"):
        write_store(tmp_path / "s", make_ops())


def hang(folder, ready):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def slow():
        yield from make_ops(2)
        ready.touch()
        time.sleep(60)

    write_store(folder, slow())


@pytest.fixture
def other_writer(tmp_path):
    """A process that is in the middle of writing `tmp_path / "s"`."""
    process = multiprocessing.get_context("fork").Process(target=hang, args=(tmp_path / "s", tmp_path / "ready"))
    process.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_a_second_writer_is_told_and_harms_nothing(tmp_path, other_writer):
    before = names(tmp_path / ".s.partial")
    with pytest.raises(UserError, match="is being written by another process"):
        write_store(tmp_path / "s", make_ops())
    assert names(tmp_path / ".s.partial") == before
    write_store(tmp_path / "t", make_ops())  # under another name it goes


def test_what_a_killed_writer_left_goes_with_the_next(tmp_path, other_writer):
    os.kill(other_writer.pid, signal.SIGKILL)
    other_writer.join()
    (tmp_path / "ready").unlink()
    assert names(tmp_path) == [".s.partial"]
    (tmp_path / ".s.partial" / "model").mkdir()
    (tmp_path / ".s.partial" / "model" / "half").write_text("half")
    write_store(tmp_path / "s", make_ops(1))
    assert names(tmp_path) == ["s"]
    assert names(tmp_path / "s") == ["index.json", "layer-000.endor.safetensors"]


def test_ctrl_c_in_another_process_leaves_nothing(tmp_path, other_writer):
    os.kill(other_writer.pid, signal.SIGINT)
    other_writer.join()
    assert names(tmp_path) == ["ready"]


def test_a_writer_that_opened_what_another_then_finished(tmp_path, monkeypatch):
    """Its lock is then on the finished store, which it must not empty."""
    really_open = os.open

    def late(path, flags, *rest, **named):
        descriptor = really_open(path, flags, *rest, **named)
        if flags & os.O_DIRECTORY and str(path).endswith(".partial"):
            monkeypatch.setattr(os, "open", really_open)
            os.replace(path, tmp_path / "s")
        return descriptor

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(UserError, match="is being written by another process"):
        write_store(tmp_path / "s", make_ops())
    assert names(tmp_path) == ["s"]
