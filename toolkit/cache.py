"""Artefacts that take long to make, kept under `data/cache/` and checked each time they are used.

An artefact is a folder `<cache>/<kind>/<label>-<digest>/` that holds its files, `key.json` (what it was made from, for
people) and `checksums.json`. The digest covers the kind, the key and the code that made it. A changed parameter or
function therefore makes a new artefact and never finds the old one.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from toolkit import paths, sources
from toolkit.errors import UserError
from toolkit.files import disk_full, file_sha256, write_json

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

KEY, CHECKSUMS = "key.json", "checksums.json"
TABLE = "table.csv"


def cached(kind: str, key: dict, code: Iterable[Path], make: Callable[[Path], None]) -> Path:
    """The folder of an artefact, made by `make(folder)` unless a sound one is there already.

    Args:
        kind: the name of a folder under the cache, such as `"pruned"`.
        key: every parameter that the artefact depends on, as plain JSON.
        code: the project files that make it, such as `sources.dependencies("toolkit.pruning")`.
        make: fills the empty folder that it is given. If it raises, nothing is kept and the error passes through.

    Two processes may ask for the same artefact: the second waits and uses what the first made. An artefact with an
    altered, missing or unreadable file is made again, with a warning that names the file. Remains of a killed process
    are removed. Raises `UserError` when no space is left or the folder cannot be written.
    """
    recipe = {"kind": kind, "key": key, "code": sources.fingerprint(code)}
    digest = sources.digest(json.dumps(recipe, sort_keys=True, allow_nan=False))
    folder = paths.cache_dir() / kind / f"{_label(key)}-{digest[:16]}"
    with _writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not _sound(folder):
                _make(folder, recipe, make)
    return folder


def cached_table(
    kind: str, key: dict, code: Iterable[Path], measure: Callable[[], "pd.DataFrame"], fresh: bool = False
) -> "pd.DataFrame":
    """A table that takes long to measure, from the cache. `kind`, `key` and `code` as in `cached`.

    With `fresh` it is measured again, and the kept one is replaced once that has succeeded.
    """
    import pandas as pd

    ready = [measure()] if fresh else []

    def make(target: Path) -> None:
        (ready.pop() if ready else measure()).to_csv(target / TABLE, index=False)

    folder = cached(kind, key, code, make)
    if ready:
        shutil.rmtree(folder)
        folder = cached(kind, key, code, make)
    return pd.read_csv(folder / TABLE)


def fault(folder: Path) -> str | None:
    """The fault of an artefact, in words that name the file. None if every checksum holds."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text())
        return next(
            (f"{name} was altered" for name, sha256 in sums.items() if file_sha256(folder / name) != sha256), None
        )
    except (OSError, ValueError, AttributeError) as error:
        return f"a file is unreadable ({error})"


def _label(key: dict) -> str:
    words = "-".join(str(value) for _, value in sorted(key.items()) if len(str(value)) <= 24)
    return re.sub(r"[^A-Za-z0-9._]+", "-", words)[:60].strip("-.") or "artefact"


def _sound(folder: Path) -> bool:
    if not folder.exists():
        return False
    wrong = fault(folder)
    if wrong:
        log.warning("cache: %s in %s; making it anew", wrong, folder)
    return wrong is None


def _make(folder: Path, recipe: dict, make: Callable[[Path], None]) -> None:
    partial = folder.with_name(
        folder.name + ".partial"
    )  # one name: whoever holds the lock may clear what was left here
    shutil.rmtree(partial, ignore_errors=True)
    start = time.perf_counter()
    try:
        partial.mkdir()
        make(partial)
        write_json(partial / KEY, recipe | {"make_s": round(time.perf_counter() - start, 3)})
        files = sorted(file for file in partial.rglob("*") if file.is_file())
        write_json(partial / CHECKSUMS, {file.relative_to(partial).as_posix(): file_sha256(file) for file in files})
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if disk_full(error):
            raise UserError(
                f"no space left while making {folder}: free some, or set TOOLKIT_CACHE_DIR to a folder on a larger disk"
            ) from error
        if isinstance(error, PermissionError):
            raise UserError(
                f"cannot write {error.filename or folder}: set TOOLKIT_CACHE_DIR to a writable folder"
            ) from error
        raise
