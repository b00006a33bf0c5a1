"""JSON and YAML files that anyone may have written: they are read within limits, and refused in one line.

    records = load_yaml(file)
    checked(records, list[Record], file)

The values read are plain: null, booleans, integers, floats, text, lists, and mappings with text for keys. The error
names the file and the place in it. It is a `UserError`, or another class that the caller asks for.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NotRequired

from toolkit.errors import UserError, disk_trouble

if TYPE_CHECKING:
    import pandas as pd
    from pydantic import TypeAdapter

LIMIT_BYTES = 64 << 20
LIMIT_VALUES = 4_000_000  # aliases in YAML repeat what they name, so a short file can hold billions
LIMIT_DEPTH = 100
OF_THE_PROCESS = {errno.EMFILE, errno.ENFILE}  # no fault of the file that could not be opened
SCALARS = (type(None), bool, int, float, str)


def regular_size(path: Path) -> int:
    """The bytes of a regular file. Raises `OSError` for any other: opening a FIFO would wait for ever."""
    status = os.stat(path)
    expect_regular(status)
    return status.st_size


def expect_regular(status: os.stat_result) -> None:
    """Raise `OSError` unless this is the status of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


def load_json(path: Path, error: type[UserError] = UserError, words: str = "cannot be read") -> Any:
    """The contents of a JSON file.

    Raises `error`, with the `words` in its message, if it cannot be read, is too large or nested too deeply.
    """
    return _load(path, json.loads, error, words)


def load_yaml(path: Path) -> Any:
    """The contents of a YAML file. Raises `UserError` as `load_json` does, and for a date or other type of its own."""
    import yaml

    def parse(text: str) -> object:
        try:
            return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # in C: ten times as fast
        except (yaml.YAMLError, TypeError) as fault:  # a key that is a list is a TypeError in some versions
            raise ValueError(fault) from fault

    return _load(path, parse, UserError, "cannot be read")


def load_csv(path: Path, kinds: Mapping[str, type] = MappingProxyType({})) -> "pd.DataFrame":
    """A table. Raises `UserError` if it cannot be read, or lacks a column of `kinds`, or one of numbers holds others.

    `kinds`: the columns that are needed, each with `float` for numbers, missing ones too, or `str` for anything.
    """
    import pandas as pd

    try:
        table = pd.read_csv(BytesIO(read_regular(path, LIMIT_BYTES)), low_memory=False)
    except (OSError, ValueError, OverflowError, pd.errors.ParserError) as fault:
        raise UserError(f"{path}: cannot be read as a table: {line(fault)}") from fault
    for name, kind in kinds.items():
        if name not in table:
            raise UserError(f"{path}: has no column {name!r}; its columns are {line(', '.join(map(str, table)))}")
        if kind is float and not (pd.api.types.is_numeric_dtype(table[name]) or table.empty):
            raise UserError(f"{path}: column {name!r} holds {line(table[name].iloc[0])}; expected numbers")
    return table


def checked(value: object, kind: Any, path: Path | str, error: type[UserError] = UserError, strict: bool = True) -> Any:
    """The value, if it is of a type that pydantic knows, such as `list[int]`; if `strict`, 1.0 is no integer.

    Without `strict`, a mapping becomes the dataclass that `kind` names, and a list a tuple.

    Raises `error`, which names the file, the first place that is wrong, the value there and the expectation.
    """
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_python(value, strict=strict)
    except ValidationError as fault:
        first = fault.errors()[0]
        place = line(_place(value, first["loc"]))
        raise error(f"{path}: {place}: {line(repr(first['input']))[:99]}: {line(first['msg'])}") from fault


@cache
def adapter(kind: Any) -> "TypeAdapter":
    """The validator of a type, made once: for dataclasses of many fields that takes milliseconds."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def mapping(name: str, required: Mapping[str, Any], optional: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A type for `checked`: a mapping with these fields, each of its type, and no others."""
    from pydantic import ConfigDict
    from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

    typed_dict: Any = TypedDict  # with fields that are known at run time only
    made = typed_dict(name, {**required, **{key: NotRequired[kind] for key, kind in optional.items()}})
    made.__pydantic_config__ = ConfigDict(extra="forbid", regex_engine="python-re")
    return made


def parse_json(text: str, kind: Any, path: Path | str) -> Any:
    """The value of JSON text that a file holds. Raises `UserError` for text that is no JSON, and as `checked` does."""
    return checked(_plain(lambda: json.loads(text), path, UserError, "cannot be read"), kind, path)


def read_regular(path: Path, limit: int, flags: int = 0) -> bytes:
    """The bytes of a regular file. Raises `OSError` for another kind of file, `ValueError` for more than `limit` bytes.

    `flags` are added to those of `os.open`, such as `os.O_NOFOLLOW`.
    """
    # without O_NONBLOCK, opening a FIFO waits for somebody who writes to it
    with open(path, "rb", opener=lambda name, given: os.open(name, given | flags | os.O_NONBLOCK)) as stream:
        expect_regular(os.fstat(stream.fileno()))
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit >> 20} MB")
    return data


def line(error: object) -> str:
    """An error's message as one line of bounded length."""
    return " ".join(str(error).split())[:300]


def _load(path: Path, parse: Callable[[str], object], error: type[UserError], words: str) -> Any:
    return _plain(lambda: parse(read_regular(path, LIMIT_BYTES).decode("utf-8")), path, error, words)


def _plain(value_of: Callable[[], object], path: Path | str, error: type[UserError], words: str) -> Any:
    try:
        value = value_of()
        _expect_plain(value)
    except RecursionError as fault:
        raise error(f"{path}: {words}: nested more than {LIMIT_DEPTH} deep") from fault
    except (OSError, ValueError) as fault:
        if isinstance(fault, OSError) and fault.errno in OF_THE_PROCESS:
            raise disk_trouble(fault, path) from fault
        raise error(f"{path}: {words}: {line(fault)}") from fault
    return value


def _expect_plain(value: object) -> None:
    """Raise `ValueError` for a type that JSON does not have, for text that is no Unicode, and beyond the limits."""
    level, seen = [value], 0
    for _ in range(LIMIT_DEPTH):
        inner = []
        for item in level:
            if isinstance(item, dict):
                inner += item
                inner += item.values()
                if not all(isinstance(key, str) for key in item):
                    raise ValueError(f"a key {next(key for key in item if not isinstance(key, str))!r}: expected text")
            elif isinstance(item, list):
                inner += item
            elif not isinstance(item, SCALARS):
                raise ValueError(f"{str(item)[:40]!r} is read as a {type(item).__name__}: put it in quotes")
            elif isinstance(item, str) and not item.isascii():
                item.encode()  # half a surrogate pair is a UnicodeEncodeError
            if (seen := seen + 1) + len(inner) > LIMIT_VALUES:
                raise ValueError(f"more than {LIMIT_VALUES} values")
        if not (level := inner):
            return
    raise ValueError(f"nested more than {LIMIT_DEPTH} deep")


def _place(value: object, path: Sequence[str | int]) -> str:
    """Where a fault is: in a list of records the record's id or number, and the place in it."""
    if not isinstance(value, list):
        return "/".join(map(str, path)) or "the whole"
    if not path:
        return "the records"
    record, within = value[path[0]], ".".join(map(str, path[1:])) or "the record"
    named = isinstance(record, dict) and isinstance(record.get("id"), str)
    return f"record {record['id'] if named else f'number {path[0] + 1}'}: {within}"
