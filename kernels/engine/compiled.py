"""Kernels that Numba compiles when they are first called, and that later processes take from files.

An entry is a file, and its name is a digest of everything that the machine code depends on: the contents of all
kernels' files, the versions and settings of Python, Numba, LLVM and NumPy, the CPU and its features, the function, what
its closure holds, and the types of its arguments.

Code is kept only if it was compiled from the files as they are. Python reads a module when it is first imported, which
may be hours after the process began. So nothing is kept after a file has changed.

Files are written whole or not at all, and begin with a checksum. If a file cannot be read or written, the kernel is
compiled again. They
hold pickles, which can run code when they are read: the folder is the user's own and nobody else can enter it.
"""

import hashlib
import json
import logging
import pickle
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import FunctionType

import numba
from llvmlite import ir
from numba.core import config
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import NullCache
from numba.core.compiler import Compiler, CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps
from numba.extending import _Intrinsic

from toolkit.cache import shelf
from toolkit.errors import UserError
from toolkit.files import replacing
from toolkit.progress import tell_once
from toolkit.timeline import compiled_since

OURS = "toolkit.kernels."
FOLDER = Path(__file__).parents[1]  # of all kernels' sources
# how Numba compiles functions of rows: C calls none of them
COMPILE = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
CHECKSUM_BYTES = hashlib.sha256().digest_size
PLAIN = (bool, int, float, str, type(None), numba.types.Type, ir.Constant, ir.Type)
OF_TORCH = ("torch", "dtype")  # its types, which need not be imported here

log = logging.getLogger(__name__)

if config.DISABLE_JIT:
    raise UserError("NUMBA_DISABLE_JIT is set, but kernels use instructions that only compiled code has: unset it")


def state() -> list[tuple]:
    """Each file with its size and times. A file that is changed and put back has another change time."""
    files = ((file, file.stat()) for file in sorted(FOLDER.rglob("*.py")) if file.is_file())
    return [(file, found.st_size, found.st_mtime_ns, found.st_ctime_ns) for file, found in files]


AT_IMPORT = state()  # `toolkit.kernels` imports this module before any other


def changed() -> bool:
    """Whether a file was changed, added or removed since."""
    try:
        return state() != AT_IMPORT
    except OSError:  # one is just being removed
        return True


@cache
def contents() -> str:
    """SHA-256 of all names and contents, as hexadecimal: of what was imported, if nothing has `changed` afterwards."""
    digest = hashlib.sha256()
    for file, *_ in AT_IMPORT:
        code = file.read_bytes()
        digest.update(f"{file.relative_to(FOLDER)} {len(code)}\n".encode() + code)
    return digest.hexdigest()


def compiled(function: Callable | None = None, **options) -> Callable:
    """Decorate a function of rows: `numba.njit` with `COMPILE` and these options, kept in files."""
    if function is None:
        return partial(compiled, **options)
    made = numba.njit(**COMPILE | options, pipeline_class=RandomNumbers)(function)
    made._cache = Files(function)
    made.get_call_template = partial(_of_any_value, made.get_call_template)
    return made


def _of_any_value(get_call_template: Callable, args: tuple, kws: dict) -> tuple:
    """How a kernel calls another one: not compiled once more for each constant that it gives, which Numba would do."""
    return get_call_template(tuple(map(numba.types.unliteral, args)), kws)


class RandomNumbers(Compiler):
    """Numba's compiler, but whatever it compiles on the way gets a random number instead of the next one.

    Numba numbers functions from 1 in each process, and these numbers tell closures of one name apart in the names that
    LLVM links by. A third process loads the code of two others, so their numbers must differ. Numba compiles one
    function at a time, so nobody else's function gets such a number.
    """

    def compile_extra(self, func: FunctionType) -> CompileResult:
        """Compile a function."""
        counted = FunctionIdentity._unique_ids
        FunctionIdentity._unique_ids = iter(lambda: secrets.randbits(62), None)
        try:
            return super().compile_extra(func)
        finally:
            FunctionIdentity._unique_ids = counted


class Files(NullCache):
    """The cache of one function's compiled code: Numba asks it before it compiles, and hands it the result."""

    def __init__(self, function: FunctionType):
        self.function, self.begun = function, 0.0

    def load_overload(self, signature, target_context) -> CompileResult | None:
        """The code for these types of arguments; None if there is none."""
        self.begun = time.perf_counter()
        target_context.refresh()
        file = self._file(signature, target_context.codegen())
        try:
            content = file.read_bytes() if file else b""
            if not content or signed(file, content[CHECKSUM_BYTES:]) != content:
                return None
            code = CompileResult._rebuild(target_context, *pickle.loads(content[CHECKSUM_BYTES:]))
            compiled_since(self.begun)
            return code
        except FileNotFoundError:
            tell_once("compiling kernels for this processor, once")
            return None
        except Exception as error:  # whatever is wrong with a file, the kernel can be compiled
            log.warning("%s is compiled anew, since %s cannot be used: %r", self.function.__name__, file, error)
            return None

    def save_overload(self, signature, result: CompileResult) -> None:
        """Keep what was just compiled, unless it holds addresses of this process."""
        compiled_since(self.begun)
        if result.library.has_dynamic_globals or result.lifted:
            return
        if file := self._file(signature, result.codegen):
            content = dumps(result._reduce())
            try:
                with replacing(file) as made:
                    made.write_bytes(signed(file, content))
            except UserError as error:
                log.info("%s is not kept: %s", self.function.__name__, error)

    def _file(self, signature, codegen) -> Path | None:
        """Where code lies or will lie; None where nothing may be kept."""
        try:
            key = [identity(self.function), str(signature), [str(part) for part in codegen.magic_tuple()]]
        except TypeError as error:
            log.info("%s is not kept: %s", self.function.__name__, error)
            return None
        if (folder := _folder()) is None or changed():
            return None
        return folder / f"{self.function.__name__}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}"


def ran_before(what: str) -> bool:
    """Whether `note_run` noted this for these kernels: then most of what it calls is compiled already."""
    folder = _folder()
    return folder is not None and not changed() and (folder / f"ran-{what}").exists()


def note_run(what: str) -> None:
    """Note, for later processes, that kernels for `what` are compiled and kept."""
    if (folder := _folder()) is not None and not changed():
        with suppress(OSError):
            (folder / f"ran-{what}").touch()


def signed(file: Path, content: bytes) -> bytes:
    """A file's bytes: content behind a checksum, which covers the file's name, since that says whose code it is."""
    return hashlib.sha256(file.name.encode() + content).digest() + content


def identity(value: object) -> list:
    """A text that identifies a kernel or a value in its closure: the same in every process with the same sources.

    Raises `TypeError` for anything without such a text.
    """
    if isinstance(value, PLAIN) or (type(value).__module__, type(value).__name__) == OF_TORCH:
        return [type(value).__name__, str(value)]
    if isinstance(value, Dispatcher):
        return ["compiled", identity(value.py_func)]
    if isinstance(value, _Intrinsic):
        return ["intrinsic", identity(value._defn)]
    if isinstance(value, FunctionType) and value.__module__.startswith(OURS):
        held = [identity(cell.cell_contents) for cell in value.__closure__ or ()]
        return [value.__module__, value.__qualname__, value.__code__.co_firstlineno, held]
    raise TypeError(f"{value!r} may be another thing in the next process")


@cache
def _folder() -> Path | None:
    """The folder for code of these sources, versions and settings; None if there can be none."""
    settings = {name: str(value) for name, value in vars(config).items() if name.isupper()}
    settings = {name: value for name, value in settings.items() if "THREADS" not in name and "CACHE" not in name}
    versions = {name: version(name) for name in ("numba", "llvmlite", "numpy")} | {"python": sys.version}
    try:
        return shelf("compiled", {"sources": contents()} | versions | {"settings": settings})
    except (OSError, UserError) as error:
        log.warning("kernels are compiled anew in each process: %s", error)
        return None
