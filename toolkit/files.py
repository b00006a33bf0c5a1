"""Files and folders that appear whole or not at all, locks, checksums, and trouble with disks in words.

All that is written is first made in a scratch folder beside its place, which only its owner can enter, and renamed when
it is whole. The folder goes at the end, also after an error or Ctrl-C. Remains of a killed process are removed when
another process writes beside them: a lock inside shows whether its process lives.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import BaseFileLock, FileLock, Timeout

from toolkit import memory_limits, paths
from toolkit.errors import UserError, disk_trouble

if TYPE_CHECKING:
    import pandas as pd

SPARE_BYTES = 16 << 20  # left free beside what is written
PREFIX = ".partial-"  # of the names of scratch folders
LOCK = ".partial-lock"  # in a scratch folder
LARGE_BYTES = 256 << 20  # less is not compared with free memory, which takes 50 µs to ask for
FOLDERS = {"TOOLKIT_CACHE_DIR": paths.cache_dir, "TOOLKIT_RESULTS_DIR": paths.results_dir}


def path_of(place: str | os.PathLike) -> Path:
    """The path that a caller named. Raises `UserError` for bytes, a descriptor or anything else that is none."""
    if not isinstance(place, str | os.PathLike):
        raise UserError(f"{place!r} is no path: expected text or a pathlib.Path")
    return Path(place)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file of the same name in a scratch folder, which takes the place of `path` at the end of the block.

    A reader never sees half a file. Nothing changes if the block raises. Raises `UserError` for trouble with the disk.
    """
    with disk_trouble_told(path), scratch_folder(path.parent) as scratch:
        made = scratch / path.name
        made.touch()
        yield made
        _make_accessible(made, scratch)
        made.replace(path)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `folder` at the end of the block; else as `replacing`.

    A folder, file or link that had the name before is then removed; the target of a link stays.
    """
    with disk_trouble_told(folder), scratch_folder(folder.parent) as scratch:
        made = scratch / folder.name
        made.mkdir()
        yield made
        put_in_place(made, folder)


@contextlib.contextmanager
def new_folder(folder: Path, made: bool = True) -> Iterator[Path]:
    """An empty folder to fill, which becomes `folder` at the end of the block, once the disk has all of it.

    Unless `made`, the block gets a path of that name and makes the folder itself. Raises `UserError` if `folder` is
    there already, has nowhere to be, or is just being written by another process, and for trouble with the disk.
    Nothing is left behind then, nor when the block raises anything else.
    """
    with disk_trouble_told(folder):
        _check_free(folder)
        remove_leftovers(folder.parent)
        if any(os.path.lexists(scratch / folder.name) for scratch in _scratch_folders(folder.parent)):
            raise UserError(f"{folder} is being written by another process: wait for it, or name another folder")
        with scratch_folder(folder.parent) as scratch:
            whole = scratch / folder.name
            whole.mkdir()  # which other processes see
            if not made:
                whole = scratch / f"{PREFIX}inside" / folder.name
                whole.parent.mkdir()
            yield whole
            _make_accessible(whole, scratch)
            for path in (*whole.rglob("*"), whole):
                _sync(path)
            _check_free(folder)
            whole.rename(folder)
            _sync(folder.parent)


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A private folder in `parent`, removed at the end of the block. It holds its lock file and nothing else.

    Raises `UserError` if it cannot be made.
    """
    with disk_trouble_told(parent):
        remove_leftovers(parent)
        folder, lock = _new_scratch(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def remove_leftovers(parent: Path) -> None:
    """Remove the scratch folders in `parent` whose processes were killed."""
    for folder in _scratch_folders(parent):
        with contextlib.suppress(OSError, Timeout):  # it just went, it is another user's, or its process lives
            if folder.lstat().st_uid == os.geteuid():
                with FileLock(folder / LOCK, blocking=False, fallback_to_soft=False):
                    shutil.rmtree(folder, ignore_errors=True)


def put_in_place(made: Path, folder: Path) -> None:
    """Rename a folder made in a scratch folder to `folder`. The folder that had that name goes with the scratch folder.

    After an error or an interrupt the old folder or the new one is in place.
    """
    scratch = made.parent
    _make_accessible(made, scratch)
    replaced = scratch / ".replaced"
    try:
        if os.path.lexists(folder):
            os.rename(folder, replaced)
        os.rename(made, folder)
    except BaseException:
        if os.path.lexists(replaced) and not os.path.lexists(folder):
            os.rename(replaced, folder)
        raise


def make_folder(folder: Path) -> Path:
    """Make a folder and those above it where they are missing, and return it. Raises `UserError` if that cannot be."""
    with disk_trouble_told(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(file: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, which is made if needed. The lock of a process that dies is released.

    Gives False, without the lock, if another process or thread has it and `wait` is not set. Whoever holds the lock may
    remove the file. Raises `UserError` if the file cannot be opened; a link is refused.
    """
    lock = FileLock(file, blocking=wait, fallback_to_soft=False)
    with disk_trouble_told(file), contextlib.suppress(Timeout):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


@contextlib.contextmanager
def disk_trouble_told(path: Path) -> Iterator[None]:
    """Turn trouble with a disk inside the block into a `UserError` of one line that names the file, or else `path`.

    It also says what helps: another value of `TOOLKIT_CACHE_DIR` for a path in the cache, for example.
    """
    try:
        yield
    except Exception as error:
        named = getattr(error, "filename", None)
        about = _shown(named if isinstance(named, str | bytes | os.PathLike) else path)
        if (trouble := disk_trouble(error, about, elsewhere(path))) is None:
            raise
        raise trouble from error


def write_json(file: Path, value: object) -> None:
    """Replace a file by a value as JSON. Raises `UserError` for trouble with the disk."""
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_csv(file: Path, table: "pd.DataFrame") -> None:
    """Replace a file by a table without its index. Raises `UserError` for trouble with the disk."""
    with replacing(file) as temporary:
        table.to_csv(temporary, index=False)


def read_json(file: Path) -> dict:
    """A JSON object that `write_json` wrote. A file that is absent, broken, no object or no plain file gives {}."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):  # the last is for lists in lists in lists
        return {}
    return found if isinstance(found, dict) else {}


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_space(folder: Path, nbytes: int) -> None:
    """Raise `UserError` unless the disk of a folder has room for so many bytes more."""
    with disk_trouble_told(folder):
        free = shutil.disk_usage(folder).free
    if free < nbytes + SPARE_BYTES:
        raise UserError(
            f"{_shown(folder)}: no space left; {(nbytes + SPARE_BYTES) / 1e6:.0f} MB more are needed, of which "
            f"{SPARE_BYTES / 1e6:.0f} stay free, and {free / 1e6:.0f} MB are free; "
            f"free some, or {elsewhere(folder)}"
        )


def _new_scratch(parent: Path) -> tuple[Path, BaseFileLock]:
    """A scratch folder and the lock that tells that its process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            (folder / LOCK).touch()
            lock = FileLock(folder / LOCK, blocking=False, fallback_to_soft=False)
            lock.acquire()
            if (folder / LOCK).exists():
                return folder, lock
        except BaseException as error:
            removed = isinstance(error, Timeout) or not folder.exists()  # by another process, before it was locked
            shutil.rmtree(folder, ignore_errors=True)
            if not removed:
                raise


def _scratch_folders(parent: Path) -> list[Path]:
    with contextlib.suppress(PermissionError), os.scandir(parent) as entries:
        return [Path(at.path) for at in entries if at.name.startswith(PREFIX) and at.is_dir(follow_symlinks=False)]
    return []  # one may write there, but not look


def _make_accessible(made: Path, scratch: Path) -> None:
    """Give files the permissions that new ones have here; some libraries make files that only the owner can read."""
    lock = (scratch / LOCK).stat()
    usual = stat.S_IMODE(lock.st_mode)  # what the umask left of it; to ask for the umask itself, one must set it
    for path in (made, *made.rglob("*")) if made.is_dir() else (made,):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) and usual & ~mode:
            path.chmod(stat.S_IMODE(mode) | usual)


def check_memory(nbytes: int, what: str) -> None:
    """Raise `UserError` if `what` is large and would not fit into the memory that is free."""
    if nbytes < LARGE_BYTES:
        return
    if nbytes > (free := memory_limits.free_bytes()):
        raise UserError(f"{what} takes {nbytes / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free")


def _check_free(folder: Path) -> None:
    if not folder.parent.is_dir():
        raise UserError(f"no folder {folder.parent} to write {folder.name} into: make it, or name another")
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already: name a new folder, or remove it first")


def _shown(path: str | bytes | os.PathLike) -> Path:
    """The path that a user knows: where a file in a scratch folder will be."""
    parts = Path(os.fsdecode(path)).parts
    return Path(*(part for part in parts if not part.startswith(PREFIX)))


def elsewhere(path: Path) -> str:
    """Words that say how to use another place than a path's."""
    for variable, place in FOLDERS.items():
        with contextlib.suppress(UserError):  # there is no checkout
            if path.absolute().is_relative_to(place().absolute()):
                return f"set {variable} to another folder"
    return "name another place"


def _sync(path: Path) -> None:
    """Wait until the disk has a file or folder. The target of a link is not ours."""
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
