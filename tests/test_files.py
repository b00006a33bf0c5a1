"""Who may write a folder, what is left when a writer is stopped, and how trouble with a disk is told."""

import errno
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.storage.conftest import make_ops, names
from toolkit import files, paths
from toolkit.errors import DISK_TROUBLE, UserError, run_command
from toolkit.storage.writing import write_store


def test_a_folder_that_is_there_is_never_touched(tmp_path):
    def meanwhile():
        yield from make_ops(1)
        (tmp_path / "late").mkdir()

    (tmp_path / "s").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for target, ops in {"s": make_ops(), "file": make_ops(), "link": make_ops(), "late": meanwhile()}.items():
        with pytest.raises(UserError, match="exists already"):
            write_store(tmp_path / target, ops)
    assert names(tmp_path) == ["file", "late", "link", "s"]
    assert names(tmp_path / "s") == names(tmp_path / "late") == []


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


def scratch(folder):
    """The only scratch folder in a folder."""
    (found,) = (path for path in folder.iterdir() if path.name.startswith(files.PREFIX))
    return found


def test_a_second_writer_is_told_and_harms_nothing(tmp_path, other_writer):
    before = names(scratch(tmp_path) / "s")
    with pytest.raises(UserError, match="is being written by another process"):
        write_store(tmp_path / "s", make_ops())
    write_store(tmp_path / "t", make_ops())  # under another name it goes
    assert names(scratch(tmp_path) / "s") == before


def test_what_a_killed_writer_left_goes_with_the_next(tmp_path, other_writer):
    left = scratch(tmp_path)
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    os.kill(other_writer.pid, signal.SIGKILL)
    other_writer.join()
    assert left.is_dir()
    files.write_json(tmp_path / "beside.json", {})
    assert names(tmp_path) == ["beside.json", "ready"]
    write_store(tmp_path / "s", make_ops(1))
    assert names(tmp_path / "s") == ["index.json", "layer-000.endor.safetensors"]


def test_ctrl_c_in_another_process_leaves_nothing(tmp_path, other_writer):
    os.kill(other_writer.pid, signal.SIGINT)
    other_writer.join()
    assert names(tmp_path) == ["ready"]


def test_a_leftover_that_is_a_link_or_another_users_is_not_touched(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "work").write_text("of years")
    (tmp_path / ".partial-0").symlink_to(precious)
    write_store(tmp_path / "s", make_ops(1))
    assert names(precious) == ["work"]
    (tmp_path / ".partial-9").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    write_store(tmp_path / "t", make_ops(1))
    assert ".partial-9" in names(tmp_path)


def test_what_is_written_has_the_permissions_that_the_umask_leaves(tmp_path):
    before = os.umask(umask := 0o027)
    try:
        write_store(tmp_path / "s", make_ops(1))
        files.write_json(tmp_path / "value.json", {})
        with files.replacing(tmp_path / "tool") as tool:
            tool.chmod(0o700)  # libraries make such files
        with files.replacing_folder(tmp_path / "made") as made:
            (made / "weights").touch(mode=0o600)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    expected = {path: (0o777 if path.is_dir() else 0o666) & ~umask for path in modes}
    assert modes == expected | {tmp_path / "tool": 0o700 | 0o666 & ~umask}


def test_a_folder_replaces_whatever_has_its_name(tmp_path):
    for name in ("other", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("other")
    (tmp_path / "dangling").symlink_to("nowhere")
    places = ["dangling", "file", "folder", "link", "nothing"]
    for name in places:
        with files.replacing_folder(tmp_path / name) as made:
            (made / "new").touch()
        assert names(tmp_path / name) == ["new"]
        assert not (tmp_path / name).is_symlink()
    assert names(tmp_path) == sorted(["other", *places])
    assert names(tmp_path / "other") == ["old"]


@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupt_between_two_renames_leaves_the_old_folder_or_the_new_one(tmp_path, monkeypatch, after):
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "old").touch()
    rename, calls = os.rename, []

    def interrupted(source, target):
        rename(source, target)
        calls.append(target)
        if len(calls) == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), files.replacing_folder(tmp_path / "place") as made:
        (made / "new").touch()
    assert names(tmp_path / "place") == [["old"], ["new"]][after - 1]
    assert names(tmp_path) == ["place"]


def test_a_lock_that_is_removed_by_its_holder_is_held_by_one_only(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=add_many, args=(tmp_path,)) for _ in range(3)]
    (tmp_path / "count").write_text("0")
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (tmp_path / "count").read_text() == "300"


def add_many(folder):
    for _ in range(100):
        with files.locked(folder / "lock"):
            (folder / "count").write_text(str(int((folder / "count").read_text()) + 1))
            (folder / "lock").unlink()


TROUBLE = [code for code in DISK_TROUBLE if code not in (errno.EEXIST, errno.ENOTEMPTY)]
WRITERS = {
    "store": lambda folder: write_store(folder / "made", make_ops(1)),
    "json": lambda folder: files.write_json(folder / "made", {}),
    "folder": lambda folder: files.make_folder(folder / "made"),
}


def test_trouble_with_a_disk_is_a_line_that_names_the_place(tmp_path, monkeypatch):
    """When a folder is made, and when what was written goes to the disk, where the error names no file."""
    for code in TROUBLE:

        def refused(*given, code=code):
            raise OSError(code, os.strerror(code), *map(str, [one for one in given if isinstance(one, Path)]))

        for write in WRITERS.values():
            with monkeypatch.context() as patch:
                patch.setattr(Path, "mkdir", lambda path, *_, **__: refused(path))
                with pytest.raises(UserError, match=rf"^{tmp_path}[^\n]*: [^\n]*; [^\n]*$"):
                    write(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refused)
            with pytest.raises(UserError, match=rf"^{tmp_path / 's'}: "):
                write_store(tmp_path / "s", make_ops(1))
        assert names(tmp_path) == []


def test_faults_of_the_program_pass(tmp_path):
    for error in (RuntimeError("x"), OSError(errno.EBADF, "Bad file descriptor"), ConnectionResetError("gone")):
        with pytest.raises(type(error)) as caught, files.disk_trouble_told(tmp_path):
            raise error
        assert caught.value is error


def test_a_command_line_tells_in_one_line(capsys):
    def ends_with(error):
        return run_command(lambda: (_ for _ in ()).throw(error), "later")

    assert run_command(lambda: None) == 0
    assert run_command(lambda: 1) == 1
    assert capsys.readouterr().err == ""
    assert ends_with(UserError("bad")) == 2
    assert capsys.readouterr().err == "error: bad\n"
    assert ends_with(OSError(errno.EROFS, "x", "/a\nb")) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: '/a\\nb': its file system is read-only")
    assert told.count("\n") == 1
    assert ends_with(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "later\n"
    with pytest.raises(OSError, match="nameless"):
        ends_with(OSError(errno.EIO, "nameless"))


def test_help_that_cannot_be_written_is_an_error():
    """argparse keeps silent, and the status was 0."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "toolkit", "run", "--help"]
        done = subprocess.run(command, cwd=paths.root(), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: no space left; free some\n"


DISKS = """
mount_them() {{
    cd {0}
    mkdir small large cache cache/kind results
    mount -t tmpfs -o size=1m tmpfs small
    for name in cache results; do mount --bind $name $name; mount -o remount,bind,ro $name; done
    cd -
}}
set -e
mount_them > /dev/null 2>&1
echo mounted
exec "$@"
"""
WRITES = """
import sys
from pathlib import Path
from toolkit import cache, files, paths
from toolkit.errors import run_command

def write_folder(folder):
    with files.new_folder(folder) as made:
        (made / "data").write_bytes(bytes(2_000_000))

root = Path(sys.argv[1])
attempts = [
    lambda: write_folder(root / "small" / "s"),
    lambda: files.write_json(root / "small" / "s", {"a": "x" * 2_000_000}),
    lambda: write_folder(root / "cache" / "s"),
    lambda: files.write_json(paths.results_dir() / "x.json", {}),
    lambda: cache.cached("kind", {}, [], lambda folder: None),
    lambda: files.write_json(root / "large" / ("x" * 300), {}),
]
for attempt in attempts:
    assert run_command(attempt) == 2
"""


def test_real_disks(tmp_path):
    """Full and read-only ones, where this user may mount them."""
    command = ["unshare", "--mount", "--map-root-user", "bash", "-c", DISKS.format(tmp_path), "disks"]
    if shutil.which(command[0]) is None:
        pytest.skip("no unshare here")
    environment = os.environ | {f"TOOLKIT_{name.upper()}_DIR": str(tmp_path / name) for name in ("cache", "results")}
    options = {"capture_output": True, "text": True, "env": environment, "cwd": paths.root(), "check": False}
    done = subprocess.run([*command, sys.executable, "-c", WRITES, str(tmp_path)], **options)
    if done.stdout != "mounted\n":
        pytest.skip("no file systems can be mounted here")
    told = [line.removeprefix(f"error: {tmp_path}/").split(";")[0] for line in done.stderr.splitlines()]
    read_only = "its file system is read-only"
    assert told[:2] == ["small/s: no space left"] * 2
    assert [line.split(": ")[1] for line in told[2:5]] == [read_only] * 3
    assert [line.split(":")[0].split("/")[0] for line in told[2:5]] == ["cache", "results", "cache"]
    assert told[5].endswith("a name in this path is too long")
    assert len(told) == 6
