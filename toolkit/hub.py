"""The Hugging Face hub and its libraries: whether it can be reached, no foreign code, no noise, plain errors."""

import contextlib
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

from toolkit import interrupts
from toolkit.errors import UserError, disk_trouble
from toolkit.records import line

# tqdm would ask for widgets in every notebook that imports transformers; text bars do
warnings.filterwarnings("ignore", message="IProgress not found")

NO_CODE = {"trust_remote_code": False}  # else transformers asks whether to run a model folder's own code
NO_TOKENIZER = "it holds no tokenizer that transformers can read, such as a tokenizer.json"
UNUSED = ("accelerate", "hqq", "kernels", "peft", "scipy", "sklearn", "torch_distributed", "vision")
BASES = ("numba", "transformers.modeling_layers", "transformers.generation.utils")  # what every model needs
HIDDEN = ("PIL", "scipy")  # packages that transformers and Numba import wherever they are installed
COMPILER, COMPILED_MASKS = "torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op"
PROBE_S = 5
OURS = tuple(f"{Path(__file__).parents[1] / name}{os.sep}" for name in ("toolkit", "kernels"))
LIBRARY = f"{os.sep}transformers{os.sep}"  # in the names of its files
CHATTY = ("datasets", "filelock", "fsspec", "httpx", "huggingface_hub", "lm_eval", "transformers", "urllib3")


@cache
def reachable() -> bool:
    """Whether the hub (`HF_ENDPOINT`) answers within seconds. False under `HF_HUB_OFFLINE`. One process asks once."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_S)
    except Exception as error:  # the HTTP library differs between versions of huggingface_hub, and so do its errors
        logging.getLogger(__name__).info("no hub at %s: %s", constants.ENDPOINT, error)
        return False
    return True


def require(what: str, offline: str) -> None:
    """Raise a `UserError` unless `what` may be had: the hub answers, or `HF_HUB_OFFLINE` says to use its local cache.

    `offline` says what to use instead.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not reachable():
        raise UserError(
            f"{what} needs the Hugging Face hub, which cannot be reached; {offline} (HF_HUB_OFFLINE=1 uses its cache)"
        )


@contextlib.contextmanager
def foreign_code(*what: object) -> Iterator[None]:
    """Turn whatever a library raises over somebody's file into a `UserError` of one line: `what: the reason`.

    Libraries check few entries of a file before they use them, so any exception may come, also a panic of Rust code,
    which is no `Exception`. Interrupts, lack of memory, a full or closed output and errors of the toolkit itself pass:
    the block should do nothing but call the library, and an error that arises where transformers has called the toolkit
    is the toolkit's.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        if interrupts.received():
            raise interrupts.Interrupted from error
        if _lacks_memory(error) or _is_nameless(error) or _is_ours(error):
            raise
        raise disk_trouble(error) or UserError(": ".join([*map(str, what), reason(error)])) from error


def _lacks_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _is_nameless(error: BaseException) -> bool:
    """Whether the system refused something that has no path, such as a write to standard output."""
    return isinstance(error, OSError) and error.errno is not None and error.filename is None


def _is_ours(error: BaseException) -> bool:
    """Whether transformers had called the toolkit, such as a replaced layer, when the error arose."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = next((at for at, file in reversed(list(enumerate(files))) if LIBRARY in file), len(files))
    return any(file.startswith(OURS) for file in files[called:])


def reason(error: BaseException) -> str:
    """Why transformers could not load something, in one line. Refusals made here on purpose have words of their own."""
    words = str(error)
    if "in your `generate` call" in words:
        return "its generation_config.json asks for code on the hub (custom_generate), which is never run here"
    if "trust_remote_code" in words:
        return "its config.json asks for code of its own (auto_map), which is never run here"
    if "safetensors" in words and "no file named" in words:
        return "it holds no safetensors files, and pickled weights are not read, since they can run code; convert it"
    if "ignore_mismatched_sizes" in words:
        return "its tensors have other shapes than its config says"
    if "instantiate the backend tokenizer" in words:
        return NO_TOKENIZER
    first = line((str(error).strip().splitlines() or [""])[0]).rstrip(".:")
    if isinstance(error, ValueError | RuntimeError | OSError) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def read_tokenizer(place: str | os.PathLike, **options):
    """The tokenizer of a folder or an id, by `options` of `from_pretrained`. Raises `UserError` for one without words.

    transformers makes an empty one for some folders that have none. Its other errors pass.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place, **NO_CODE, **options)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(NO_TOKENIZER)
    return tokenizer


@contextlib.contextmanager
def lean(*packages: str) -> Iterator[None]:
    """Have transformers import without optional packages: those given, or all that generating text never uses.

    The latter includes torch's compiler. It saves seconds and memory. Modules imported inside the block stay
    without them. Several threads may be in such blocks at once.
    """
    with contextlib.ExitStack() as stack:
        if not packages and BASES[-1] not in sys.modules:
            stack.enter_context(_shared(COMPILER, _without_compiler))
        for package in packages or UNUSED:
            stack.enter_context(_shared(package, partial(_without, package)))
        for name in () if packages else BASES:
            import_module(name)
        yield
    if not packages:
        _ask_again()


def quiet() -> contextlib.AbstractContextManager[None]:
    """Silence progress bars, warnings and informational logs of the Hugging Face libraries and lm-eval; errors stay."""
    return _shared("quiet", _silence)


_CHANGES: dict[str, tuple[int, contextlib.ExitStack]] = {}  # those of the process, and how many blocks need each
_LOCK = threading.RLock()


@contextlib.contextmanager
def _shared(name: str, change: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Change the process for a block. Threads whose blocks overlap share the change, and the last one undoes it.

    Without that a thread could restore what another one had changed.
    """
    with _LOCK:
        users, stack = _CHANGES.get(name) or (0, contextlib.ExitStack())
        if not users:
            stack.enter_context(change())
        _CHANGES[name] = users + 1, stack
    try:
        yield
    finally:
        with _LOCK:
            users, stack = _CHANGES.pop(name)
            if users > 1:
                _CHANGES[name] = users - 1, stack
            else:
                stack.close()


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    from transformers import utils

    name = f"is_{package}_available"
    known = {part: getattr(part, name) for part in (utils, utils.import_utils) if hasattr(part, name)}
    for part in known:
        setattr(part, name, lambda *_, **__: False)
    try:
        yield
    finally:
        for part, function in known.items():
            setattr(part, name, function)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Stand-ins for modules that are not imported yet; None for one that cannot be imported inside the block."""
    with standing_in(dict.fromkeys(HIDDEN) | {name: _Compiler(name) for name in (COMPILER, COMPILED_MASKS)}):
        yield


@contextlib.contextmanager
def standing_in(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Inside the block these modules stand in for those that are not imported yet; None for one that cannot be."""
    absent = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(absent)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def _ask_again() -> None:
    """Have transformers forget its kept answers to what is installed."""
    from transformers.utils import import_utils

    for answer in vars(import_utils).values():
        getattr(answer, "cache_clear", lambda: None)()


class _Compiler(ModuleType):
    """In the place of torch's compiler, which its first decorator would import: decorators leave functions as they are.

    A class for masks that few models make is the real one: it is imported when it is called.
    """

    __path__ = ()  # it has submodules

    def __getattr__(self, name: str):
        """A decorator, or the class."""
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_real, name) if self.__name__ == COMPILED_MASKS else _as_it_is


def _real(name: str, *given: object) -> object:
    with _LOCK:
        for module in (COMPILER, COMPILED_MASKS):
            if isinstance(sys.modules.get(module), _Compiler):
                del sys.modules[module]
        return getattr(import_module(COMPILED_MASKS), name)(*given)


def _as_it_is(function=None, *_: object, **__: object):
    """As a decorator with or without arguments: the function itself."""
    return _as_it_is if function is None else function


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    import huggingface_hub.utils as hub
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    levels = {name: logging.getLogger(name).level for name in CHATTY}
    transformers_logging.disable_progress_bar()
    hub.disable_progress_bars()
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with _no_warnings():
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars[0]:
            transformers_logging.enable_progress_bar()
        if bars[1]:
            hub.enable_progress_bars()


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """`warnings.catch_warnings` replaces the list of filters, as libraries in other threads do, too.

    They would put back the list with our filter after we had put back ours. So the filter is taken out of its list.
    """
    filters, ours = warnings.filters, ("ignore", None, Warning, None, 0)
    filters.insert(0, ours)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for each in {id(each): each for each in (filters, warnings.filters)}.values():
            each[:] = [it for it in each if it is not ours]  # type: ignore[index]
