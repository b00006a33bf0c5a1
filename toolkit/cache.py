"""Artefacts that take long to make, kept under `data/cache/`.

An artefact is a folder `<cache>/<kind>/<label>-<digest>/` that holds its files and `key.json`: what it was made from,
for people, and the sizes of its files. The digest covers kind, key and code, so that a changed parameter or function
makes a new artefact. It is made in a scratch folder and renamed.

`@kept("kind")` keeps what a function returns, `@kept_folder("kind")` the files that it writes: the arguments are the
key. `cached` and `cached_table` take key and code as they are, for what depends on more than arguments and a module.

An artefact may have taken hours, so none is removed unless the user asks for it, by `TOOLKIT_CACHE_GB` or
`./papermill_runs.sh --clean GB`. The least recently used go first. A process keeps a shared lock on the folders that it
uses, and these stay. Artefacts that take seconds to make (`shelf`) also go when they were not used for a month.
"""

import contextlib
import fcntl
import functools
import inspect
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import paths, sources
from toolkit.errors import UserError
from toolkit.files import (
    disk_trouble_told,
    elsewhere,
    locked,
    make_folder,
    read_json,
    remove_leftovers,
    replacing_folder,
    scratch_folder,
    write_json,
)

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

KEY = "key.json"
TABLE = "table.csv"
NAME = re.compile(r".+-[0-9a-f]{16}")
LIMIT = "TOOLKIT_CACHE_GB"
SHELF_DAYS = 30
WARN_GB = 20  # without a limit, say so when a new artefact takes the cache beyond this
MOST_HELD = 200  # open descriptors; a process may have some 1000
LOOK_S = 60  # between two looks at how much there is: with 500 artefacts one takes 0.1 s, as long as some take to make

_looked: dict[Path, float] = {}  # the caches, and when this process looked at how much there is, by `time.monotonic`
_held: dict[Path, int] = {}  # folders in use by this process, and the descriptors of their locks, latest last


def kept(kind: str, without: Iterable[str] = (), key: Callable[..., Mapping[str, object]] = dict) -> Callable:
    """Decorates a function that returns a table: it runs once for the same arguments and code, then the file is read.

        @kept("thresholds", without=("toolkit.models.loading",), key=lambda setting: {"weights": checksum(setting)})
        def thresholds(setting: Setting, zeros: float) -> pd.DataFrame: ...

        thresholds(setting, 0.9)
        thresholds(setting, 0.9, fresh=True)  # runs again, and replaces what was kept
        thresholds(setting, 0.9, make=False)  # None if it is not kept

    Args:
        kind: the name of a folder under the cache.
        without: modules left out of the code, as `sources.dependencies` takes them. The code is the function's module
            with all that it imports.
        key: what the table depends on beside the arguments, such as a checksum of weights. It is called with those
            arguments that it names. A part with the name of an argument replaces that argument.

    Raises `TypeError` for an argument that is no plain value, dataclass, list, tuple or dictionary: a path, say, does
    not tell what the file holds. Raises `UserError` for a function of a notebook's cell, whose code cannot be followed,
    and what `cached` raises.
    """

    def decorated(function: Callable[..., "pd.DataFrame"]) -> Callable[..., "pd.DataFrame"]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def table(*args, fresh: bool = False, make: bool = True, **kwargs) -> "pd.DataFrame | None":
            of, code = _key(function, signature.bind(*args, **kwargs), key), _code(function, without)
            if not make and _fault(_place(kind, of, code)[0]):
                return None
            return cached_table(kind, of, code, lambda: function(*args, **kwargs), fresh)

        return table

    return decorated


def kept_folder(kind: str, without: Iterable[str] = (), key: Callable[..., Mapping[str, object]] = dict) -> Callable:
    """Decorates a function that fills the empty folder of its first parameter. The others are as for `kept`.

    @kept_folder("predictors")
    def trained(folder: Path, setting: Setting, rank: int) -> None: ...

    folder = trained(setting, 128)
    """

    def decorated(function: Callable[..., None]) -> Callable[..., Path]:
        signature = inspect.signature(function)
        _, *parameters = signature.parameters.values()
        signature = signature.replace(parameters=parameters)

        @functools.wraps(function)
        def folder(*args, fresh: bool = False, **kwargs) -> Path:
            of = _key(function, signature.bind(*args, **kwargs), key)
            return cached(kind, of, _code(function, without), lambda to: function(to, *args, **kwargs), fresh)

        return folder

    return decorated


def _key(function: Callable, bound: inspect.BoundArguments, more: Callable[..., Mapping[str, object]]) -> dict:
    """The function's name, its arguments with defaults, and the parts that `more` adds or replaces."""
    bound.apply_defaults()
    arguments = bound.arguments
    wanted = arguments.keys() & (() if more is dict else inspect.signature(more).parameters)
    parts = arguments | more(**{name: arguments[name] for name in wanted})
    return {"function": function.__qualname__} | {name: _plain(name, value) for name, value in parts.items()}


def _plain(name: str, value: object) -> object:
    """A part of a key as plain JSON. A dataclass is named, since another one may have the same fields."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(of, str) for of in value):
        return {of: _plain(f"{name}[{of!r}]", item) for of, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        values = {of.name: _plain(f"{name}.{of.name}", getattr(value, of.name)) for of in fields(value)}
        return {type(value).__name__: values}
    raise TypeError(f"{name}={value!r}: a key takes plain values and dataclasses of them; let `key=` stand for it")


def _code(function: Callable, without: Iterable[str]) -> list[Path]:
    if code := sources.dependencies(function.__module__, without=without):
        return code
    raise UserError(
        f"{function.__module__}.{function.__qualname__}: a change of it would go unseen; move it to toolkit/"
    )


def cached(kind: str, key: dict, code: Iterable[Path], make: Callable[[Path], None], fresh: bool = False) -> Path:
    """The folder of an artefact, made by `make(folder)` unless a whole one is there already.

    Args:
        kind: the name of a folder under the cache, such as `"pruned"`.
        key: every parameter that the artefact depends on, as plain JSON.
        code: the project files that make it, such as `sources.dependencies("toolkit.sparsity.layerwise")`.
        make: fills the empty folder that it is given. If it raises, nothing is kept and the error passes through.
        fresh: make it again, and replace the kept one once that has succeeded.

    A second process that asks for the same artefact waits. One with a missing or shortened file is made again, with a
    warning. A cache that cannot be written is still read. Raises `UserError` when an artefact has to be made and no
    space is left or the folder cannot be written.
    """
    folder, recipe = _place(kind, key, code)
    limit_bytes = _limit_bytes()
    if not fresh and _use(folder):
        return folder
    make_folder(folder.parent)
    with locked(_lock_file(folder)):
        if not fresh and _use(folder):  # another process has just made it
            return folder
        if os.path.lexists(folder) and not fresh:
            log.warning("cache: %s in %s; making it anew", _fault(folder), folder)
        _make(folder, recipe, make)
        _hold(folder)
    _keep_limit(limit_bytes)
    return folder


def at_hand(kind: str, key: dict, code: Iterable[Path]) -> Path | None:
    """The folder that `cached` would give for these arguments, if it is there and whole; nothing is made."""
    folder, _ = _place(kind, key, code)
    return folder if _use(folder) else None


def cached_table(
    kind: str, key: dict, code: Iterable[Path], measure: Callable[[], "pd.DataFrame"], fresh: bool = False
) -> "pd.DataFrame":
    """A table that takes long to measure, from the cache. Arguments and errors are those of `cached`."""
    import pandas as pd

    def make(target: Path) -> None:
        measure().to_csv(target / TABLE, index=False)

    try:
        return pd.read_csv(cached(kind, key, code, make, fresh) / TABLE)
    except FileNotFoundError:  # another process has just replaced it by a fresh one
        return pd.read_csv(cached(kind, key, code, make) / TABLE)


def shelf(kind: str, key: dict) -> Path:
    """A folder for small files that are made one by one, such as compiled kernels; whoever reads one checks it.

    `key` is plain JSON; another key is another folder. It is private: only its owner can enter it. It counts and goes
    like an artefact. When it is new, those of its kind that nobody has used for `SHELF_DAYS` days are removed.
    Raises `UserError` if it cannot be made, or if somebody else could write there.
    """
    folder = paths.cache_dir() / kind / f"{kind}-{sources.digest(json.dumps(key, sort_keys=True))[:16]}"
    make_folder(folder.parent)
    with disk_trouble_told(folder):
        folder.mkdir(0o700, exist_ok=True)
        found = folder.lstat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(f"{folder} is open to others: remove it, so that it is made anew")
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(f"{parent}: anyone may exchange what it holds: chmod o-w {parent}, or {elsewhere(parent)}")
    _hold(folder)
    if not (folder / KEY).is_file():
        write_json(folder / KEY, key)
        for one in artefacts():
            if one.folder.parent.name == kind and time.time() - one.used > SHELF_DAYS * 86400:
                _remove(one.folder)
    return folder


@dataclass(frozen=True)
class Artefact:
    """The cached artefacts: folder, bytes of its files, time of its last use (seconds since 1970)."""

    folder: Path
    nbytes: int
    used: float


def artefacts() -> list[Artefact]:
    """All artefacts in the cache, the one used longest ago first."""
    found = []
    for key in paths.cache_dir().glob(f"*/*/{KEY}"):
        folder = key.parent
        if NAME.fullmatch(folder.name) and not folder.is_symlink():  # else it is the user's: the cache may be anywhere
            with contextlib.suppress(FileNotFoundError):  # another process just removed it
                nbytes = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
                found.append(Artefact(folder, nbytes, folder.stat().st_mtime))
    return sorted(found, key=lambda kept: kept.used)


def shrink(limit_bytes: float = 0) -> list[Artefact]:
    """Remove artefacts, those used longest ago first, until all take at most so many bytes. Return what was removed.

    An artefact that a process uses or makes stays, whatever the limit. Remains of killed processes are removed, too.
    """
    for folder in paths.cache_dir().glob("*/"):
        remove_leftovers(folder)
    kept, removed = artefacts(), []
    excess = sum(one.nbytes for one in kept) - limit_bytes
    for one in kept:
        if excess > 0 and _remove(one.folder):
            removed.append(one)
            excess -= one.nbytes
    return removed


def _place(kind: str, key: dict, code: Iterable[Path]) -> tuple[Path, dict]:
    """The folder of an artefact, and what it is made from."""
    recipe = {"kind": kind, "key": key, "code": sources.fingerprint(code)}
    digest = sources.digest(json.dumps(recipe, sort_keys=True, allow_nan=False))
    return paths.cache_dir() / kind / f"{_label(key)}-{digest[:16]}", recipe


def _lock_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _label(key: dict) -> str:
    words = "-".join(text for value in _leaves(key) if len(text := str(value)) <= 24)
    return re.sub(r"[^A-Za-z0-9._]+", "-", words)[:60].strip("-.") or "artefact"


def _leaves(key: dict) -> Iterator[object]:
    for _, value in sorted(key.items()):
        yield from _leaves(value) if isinstance(value, dict) else (value,)


def _use(folder: Path) -> bool:
    """Lock an artefact first, so that nobody removes it, then return whether it is there and whole."""
    _hold(folder)
    return _fault(folder) is None


def _fault(folder: Path) -> str | None:
    """The file that is missing or has another size than when it was made, in words; None if there is none."""
    made = read_json(folder / KEY)
    if "code" not in made or folder.is_symlink():
        return f"{KEY} is missing or broken"
    for name, nbytes in made.get("files", {}).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != nbytes:
            return f"{name} is missing or has another size"
    return None


def _make(folder: Path, recipe: dict, make: Callable[[Path], None]) -> None:
    start = time.perf_counter()
    with replacing_folder(folder) as made:
        make(made)
        files = sorted(file for file in made.rglob("*") if file.is_file())
        sizes = {file.relative_to(made).as_posix(): file.stat().st_size for file in files}
        write_json(made / KEY, recipe | {"make_s": round(time.perf_counter() - start, 3), "files": sizes})


def _hold(folder: Path) -> None:
    """Note that an artefact is used now, and keep a shared lock on it as long as this process lives."""
    with contextlib.suppress(OSError):  # a file system that is read-only or has no locks
        os.utime(folder)
    _let_go(folder)
    while len(_held) >= MOST_HELD:
        _let_go(next(iter(_held)))
    with contextlib.suppress(OSError):  # it is not there, or as above
        _held[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(_held[folder], fcntl.LOCK_SH | fcntl.LOCK_NB)


def _let_go(folder: Path) -> None:
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)


def _limit_bytes() -> int | None:
    """The limit that the user has set. Raises `UserError` if it is no number."""
    text = os.environ.get(LIMIT)
    if not text:
        return None
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise UserError(f"{LIMIT}={text}: expected a number of gigabytes, such as {WARN_GB}")
    return int(float(text) * 1e9)


def _keep_limit(limit_bytes: int | None) -> None:
    """Remove what is beyond the limit; without one, warn when there is much."""
    if limit_bytes is not None:
        for one in shrink(limit_bytes):
            log.warning("cache: removed %s (%.2f GB) to keep %s", one.folder, one.nbytes / 1e9, LIMIT)
    elif time.monotonic() - _looked.get(paths.cache_dir(), -LOOK_S) >= LOOK_S:
        _looked[paths.cache_dir()] = time.monotonic()
        if (total_gb := sum(one.nbytes for one in artefacts()) / 1e9) > WARN_GB:
            _warn_of_much(paths.cache_dir(), round(total_gb))


@functools.cache
def _warn_of_much(folder: Path, total_gb: int) -> None:
    """Say once in a process how much there is, and again only after the number has changed."""
    advice = f"./papermill_runs.sh --clean 0 removes all of it, {LIMIT}={WARN_GB} keeps it below {WARN_GB} GB"
    log.warning("cache: %s holds %d GB; %s", folder, total_gb, advice)


def _remove(folder: Path) -> bool:
    """Remove an artefact unless a process uses or makes it; whether it is gone."""
    with locked(_lock_file(folder), wait=False) as free:
        if not free or not _is_unused(folder):
            return False
        with disk_trouble_told(folder), scratch_folder(folder.parent) as scratch:
            folder.rename(scratch / folder.name)
        _lock_file(folder).unlink(missing_ok=True)
        _let_go(folder)
    return True


def _is_unused(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
