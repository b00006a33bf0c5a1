"""Makes a checkout importable where only torch, numba-cuda and transformers are installed. Import it before `toolkit`.

`toolkit` is taken from this checkout, and `toolkit.kernels` from its folder `kernels/`. Small packages that a plain GPU
image lacks get a stand-in with what `benchmarks/gpu.py` needs of them: types of arrays, locks of files, the free memory
of Linux, and the construction of records without their checks. So a process that imports this module may read only what
it wrote itself.
"""

import contextlib
import dataclasses
import fcntl
import os
import sys
import typing
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]


class Anything:
    """Takes any subscript or arguments, and gives itself."""

    def __init__(self, *arguments, **named):
        self.given = arguments

    def __call__(self, *_, **named):
        """Give itself."""
        return self

    __getitem__ = __or__ = __ror__ = __call__


class Validator(Anything):
    """`pydantic.PlainValidator`: a function that makes the value."""


class Serializer(Anything):
    """`pydantic.PlainSerializer`: a function that makes plain JSON of the value."""


class TypeAdapter:
    """`pydantic.TypeAdapter` for dataclasses, without checks."""

    def __init__(self, kind):
        self.kind = kind

    def validate_python(self, value, strict: bool = True):
        """The value as its type has it: mappings as dataclasses, lists as tuples."""
        return _converted(self.kind, value, Validator)

    def dump_python(self, value) -> dict:
        """The value as plain JSON."""
        return _converted(self.kind, value, Serializer)


def _converted(kind, value, converter: type):
    """The value with the functions of this kind of `converter` called wherever its type names one."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        called = next((mark.given[0] for mark in kind.__metadata__ if isinstance(mark, converter)), None)
        return called(value) if called else _converted(parts[0], value, converter)
    if origin is tuple:
        return tuple(_converted(parts[0], item, converter) for item in value)
    if origin in (dict, Mapping):
        return {name: _converted(parts[1], item, converter) for name, item in value.items()}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        given = vars(value) if dataclasses.is_dataclass(value) else value
        fields = {name: _converted(hints[name], given[name], converter) for name in hints if name in given}
        return kind(**fields) if converter is Validator else fields
    return value


class ValidationError(ValueError):
    """`pydantic.ValidationError`, which nothing here raises."""


class FileLock(contextlib.AbstractContextManager):
    """`filelock.FileLock`: an advisory lock of a file, which goes with its process."""

    def __init__(self, file, blocking: bool = True, **_):
        self.file, self.flags, self.stream = file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB), None

    @property
    def is_locked(self) -> bool:
        """Whether this object has the lock."""
        return self.stream is not None

    def acquire(self):
        """Take the lock. Raises `TimeoutError` if another process has it, and it is not waited for."""
        stream = open(self.file, "a")  # noqa: SIM115 (open as long as the lock is held)
        try:
            fcntl.flock(stream, self.flags)
        except BlockingIOError as error:
            stream.close()
            raise TimeoutError(self.file) from error
        self.stream = stream
        return self

    def release(self) -> None:
        """Give the lock back."""
        if self.stream:
            self.stream.close()
        self.stream = None

    def __enter__(self):
        """Take the lock."""
        return self.acquire()

    def __exit__(self, *raised):
        """Give it back."""
        self.release()


def _memory() -> SimpleNamespace:
    """`psutil.virtual_memory()`."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(number) for name, number, *_ in lines}
    return SimpleNamespace(total=kib["MemTotal:"] << 10, available=kib["MemAvailable:"] << 10)


STAND_INS = {
    "jaxtyping": {},
    "pydantic": {
        "TypeAdapter": TypeAdapter,
        "PlainValidator": Validator,
        "PlainSerializer": Serializer,
        "ValidationError": ValidationError,
    },
    "filelock": {"FileLock": FileLock, "Timeout": TimeoutError},
    "psutil": {"virtual_memory": _memory},
}


def _stand_in(name: str, has: dict) -> ModuleType:
    def any_name(attribute: str) -> Anything:
        if attribute.startswith("__"):  # such as __file__, which a module may lack
            raise AttributeError(attribute)
        return Anything()

    module = ModuleType(name)
    module.__dict__.update(has, __getattr__=any_name, __spec__=ModuleSpec(name, None))
    return module


def install() -> list[str]:
    """Prepare the imports; return the packages that got a stand-in."""
    missing = [name for name in STAND_INS if find_spec(name) is None]
    sys.modules.update({name: _stand_in(name, STAND_INS[name]) for name in missing})
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    import toolkit

    if find_spec("toolkit.kernels") is None:  # not installed: the folder lies beside that of `toolkit`
        toolkit.__path__.append(str(ROOT))
    return missing


MISSING = install()
