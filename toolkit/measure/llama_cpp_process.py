"""llama.cpp as a whole process within a limit of memory, on a GGUF file as it is.

    for load in LOADS:
        drop_pages(file)
        run_process(file, 1_000_000_000, load, prompt=[750, 11, 42], tokens=32)

The limit counts all of the process: code, weights, buffers, cache, and pages of the file. Without one nothing is
limited.
"""

import math
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from toolkit import memory_limits
from toolkit.errors import UserError
from toolkit.measure import llama_cpp
from toolkit.measure.child import Child
from toolkit.measure.memory_group import MemoryGroup

KILLED = (-9, 137)  # exit statuses of a process that the system ended for its memory
WARM_TOKENS = 2  # generated before the clock starts: a pass brings pages of the file to the state that stays
ROOM = 8  # tokens of context beyond those asked for


class NoRoom(UserError):
    """The system ended the process, since it needs more memory than the limit."""


class TooSlow(UserError):
    """The process was ended, since it took longer than it may."""


@dataclass(frozen=True)
class Process:
    """The measurements of a process: generated tokens without the prompt; bytes are those read from the disk."""

    tokens_per_s: float
    first_s: float
    """Seconds of the prompt's pass, in the state that the warm-up left."""
    read_bytes: float
    """A token."""
    cpu_s: float
    """Seconds of all cores, a token."""
    own_bytes: int
    """Memory at the end that is of no file."""
    build: str
    opened_s: float = math.nan
    """Seconds from the start of the process until it had its first token."""
    tokens: Sequence[int] = ()
    """The generated ones; empty where llama.cpp gives the text alone."""
    text: str = ""


def run_process(
    file: Path,
    limit_bytes: int | None,
    load: str,
    prompt: Sequence[int],
    tokens: int,
    temperature: float = 0.0,
    most_s: float = threading.TIMEOUT_MAX,
) -> Process:
    """Generate some tokens to warm up, then `tokens` after the prompt, loaded as one of `llama_cpp.LOADS`.

    "pinned" pins what the limit leaves once the first tokens are generated. Drop the file's pages before the call:
    those in the page cache count for nobody. Raises `NoRoom` if the process is killed, `TooSlow` if it takes more than
    `most_s` seconds in all, and `UserError` if llama.cpp or a memory cgroup cannot be had, or if llama.cpp cannot run
    the file.
    """
    command = llama_cpp.command(file, len(prompt) + tokens + WARM_TOKENS + ROOM, load)
    request = {"tokens": list(prompt), "temperature": temperature}
    with nullcontext() if limit_bytes is None else MemoryGroup() as group:
        if group:
            group.limit(limit_bytes)
        begun_s = time.perf_counter()
        child = Child("llama.cpp", command)
        clock = threading.Timer(most_s, child.process.kill)
        clock.start()

        def own_bytes() -> int:
            return group.other_bytes if group else memory_limits.anonymous_bytes(child.process.pid)

        try:
            if group:
                group.add(child.process.pid)
            instructions = child.answer().get("build", "")
            opened_s = time.perf_counter() - begun_s
            opened_s += child.ask(generate=WARM_TOKENS, **request)["first_s"]
            llama_cpp.set_up(child, file, load, None if limit_bytes is None else limit_bytes - own_bytes())
            child.ask(generate=WARM_TOKENS, **request)
            reply, own = child.ask(generate=tokens, **request), own_bytes()
        except UserError as error:
            if time.perf_counter() - begun_s >= most_s:
                raise TooSlow(f"llama.cpp, {load}, was ended after {most_s:.0f} s") from error
            if limit_bytes is None or child.process.wait() not in KILLED:
                raise
            raise NoRoom(f"llama.cpp, {load}, needs more than {limit_bytes / 1e6:.0f} MB: it was killed") from error
        finally:
            clock.cancel()
            child.close()
    read, cpu_s = reply["read_bytes"] / tokens, reply.get("cpu_seconds", math.nan) / tokens
    build = f"{llama_cpp.which()}; {instructions}"
    numbers = 1 / reply["seconds"], reply["first_s"], read, cpu_s, own
    return Process(*numbers, build, opened_s, reply.get("tokens", ()), reply.get("text", ""))
