"""Files and folders that appear whole or not at all, checksums, and free space.

`replacing` does this for a file, `new_folder` for a folder: until everything is on the disk it is called
`.<name>.partial`; an error or Ctrl-C removes that, and what a killed process left of it goes when the same name is next
written.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import UserError

SPARE_BYTES = 16 << 20  # left free beside what is written
LARGE_BYTES = 256 << 20  # less is not compared with free memory, which takes 50 µs to ask for
FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path` to write to, which takes that name at the end of the block.

    A reader never sees half a file. The new file has the suffix of `path`, since some libraries go by it. It is removed
    if the block raises.
    """
    temporary = path.with_name(f".part-{secrets.token_hex(8)}{path.suffix}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # the umask applies; no link is followed
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(file: Path, value: object) -> None:
    """Replace a file by a value as JSON."""
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict:
    """A JSON object that `write_json` wrote. A file that is absent, broken or no object gives an empty one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def disk_full(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that no space is left; Rust libraries say so only in words."""
    while error is not None:
        if getattr(error, "errno", None) in FULL or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `folder` at the end of the block.

    Raises `UserError` if `folder` is there already, has nowhere to be, or is just being written by another process, and
    if the disk gets full. Nothing is left behind then, nor when the block raises anything else.
    """
    _check_free(folder)
    with _partial(folder) as partial, _told_when_full(folder):
        yield partial
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        _check_free(folder)
        os.replace(partial, folder)
        _sync(folder.parent)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise `UserError` unless the disk of a folder has room for so many bytes more."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + SPARE_BYTES:
        raise UserError(
            f"no space left in {folder.parent}: {nbytes / 1e6:.0f} MB more are needed and {free / 1e6:.0f} MB free; "
            "free some, or name a folder on a larger disk"
        )


def check_memory(nbytes: int, what: str) -> None:
    """Raise `UserError` if `what` is large and would not fit into the memory that is free."""
    if nbytes < LARGE_BYTES:
        return
    import psutil

    if nbytes > (free := psutil.virtual_memory().available):
        raise UserError(f"{what} takes {nbytes / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free")


def _check_free(folder: Path) -> None:
    if not folder.parent.is_dir():
        raise UserError(f"no folder {folder.parent} to write {folder.name} into: make it, or name another")
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already: name a new folder, or remove it first")


@contextlib.contextmanager
def _partial(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` that no other process writes to; gone afterwards unless it was renamed."""
    partial = folder.with_name(f".{folder.name}.partial")
    with _locked(partial, folder):
        try:
            for left in partial.iterdir():  # by a process that was killed
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(partial: Path, folder: Path) -> Iterator[None]:
    """Lock the folder itself, so that no lock file is left; whoever dies lets go."""
    try:
        partial.mkdir(exist_ok=True)
    except PermissionError as error:
        raise UserError(f"cannot write to {folder.parent}: name a folder in a writable place") from error
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not (_lock(descriptor) and _is_still(partial, descriptor)):
            raise UserError(f"{folder} is being written by another process: wait for it, or name another folder")
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether a path leads to what is open: not if the process that wrote it was done in between, and renamed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _told_when_full(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if disk_full(error) and not isinstance(error, UserError):
            raise UserError(f"no space left for {folder}: free some, or name a folder on a larger disk") from error
        raise


def _sync(path: Path) -> None:
    """Wait until the disk has a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
