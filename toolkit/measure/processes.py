"""Whole processes that generate a text within a limit of memory: `sparse-offload run`, and llama.cpp with a GGUF file.

    for turn in take_turns([OurRun("spqr", folder), LlamaCppRun("llama.cpp", file)], 1_000_000_000, "def f(x):"):
        ...                      # a `ProcessTurn` as each process ends
    table(turns)                 # a row a contestant: medians and ranges

With a memory cgroup of exactly that limit (`memory_group`), which counts code, weights, buffers and the file's pages.
Where none can be made (`missing`), `run` has its own limit (`--memory`), and llama.cpp has none.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf, isnan, nan
from pathlib import Path

import pandas as pd
import psutil

from toolkit.errors import UserError
from toolkit.measure import llama_cpp
from toolkit.measure.disturbance import Guard, Load
from toolkit.measure.llama_cpp import EXPERTS
from toolkit.measure.llama_cpp_process import KILLED as SIGNALS
from toolkit.measure.llama_cpp_process import NoRoom, run_process
from toolkit.measure.memory_group import MemoryGroup, missing
from toolkit.measure.summary import summary
from toolkit.measure.turns import take_again
from toolkit.models.gguf_header import read_header
from toolkit.offload.overhead import COMPILER
from toolkit.progress import tell
from toolkit.storage.direct import drop_pages

LEAST, TURN_S = 4, 20.0  # tokens of a turn: so many, or doubled as long as they take no longer than this
NEAR = 0.7  # of the fastest load's speed: slower loads of llama.cpp take no turns
BEHIND = 2.0  # times the seconds of the fastest load's trial: one that takes longer is ended
TRIAL_S, OPENED_PER_S = 20.0, 0.5e9  # but not before so many seconds, besides those of opening the file at this rate
RAN, KILLED, REFUSED, FAILED = "ran", "killed", "refused", "failed"
DIGEST = 8  # hexadecimal digits of a text's hash
MB = 1e6
SURE = 0.5  # share of the bytes beyond the limit that a token reads in any case
SHARED = "More does not fit into the limit, so another process holds pages of the file: let that end, or copy the file"
RANGES = ("tokens_per_s", "first_s", "read_mb", "peak_mb")


@dataclass(frozen=True)
class ProcessText:
    """The numbers that a process reached; NaN where it reached nothing.

    verdict: `RAN`, `KILLED` by the system for its memory, `REFUSED` (the limit is too small for it), or `FAILED`.
    tokens: those generated. tokens_per_s: of the tokens after the first. first_s: from the start of the process until
    the first token. read_mb: from the disk, a token. peak_mb: of memory that belongs to no file. cpu_s: seconds of all
    cores, a token after the first. text: what it generated. note: how it ran, or why not.
    """

    verdict: str
    tokens: int = 0
    tokens_per_s: float = nan
    first_s: float = nan
    read_mb: float = nan
    peak_mb: float = nan
    cpu_s: float = nan
    text: str = ""
    note: str = ""

    @property
    def digest(self) -> str:
        """A hash of the text; "" without one."""
        return sha256(self.text.encode()).hexdigest()[:DIGEST] if self.text else ""


class ProcessContestant(ABC):
    """One way of generating a text in a process of its own. `name` tells its rows from those of others."""

    name: str

    @abstractmethod
    def take(self, prompt: str, tokens: int, limit: int) -> ProcessText:
        """Generate so many tokens in a new process, in a cgroup of `limit` bytes if one can be made."""

    def warm_up(self, prompt: str, limit: int) -> None:  # noqa: B027
        """The steps before the first turn, such as compiling kernels, which are kept."""


@dataclass(frozen=True)
class ProcessTurn:
    """A contestant's outcome of a turn, and the work of others beside it."""

    name: str
    outcome: ProcessText
    load: Load


def take_turns(
    contestants: Sequence[ProcessContestant],
    limit: int,
    prompt: str,
    turns: int = 3,
    tokens: int = 32,
    expected: Mapping[str, float] = {},
    done: Callable[[ProcessTurn], None] = lambda turn: None,
    turn_s: float = TURN_S,
) -> list[list[ProcessTurn]]:
    """The turns of all contestants within one limit, a list for each repetition.

    Each repetition begins with the next contestant. One that other work disturbed is taken again (`take_again`). A
    contestant that does not run is not asked twice. One of unknown speed first generates `LEAST` tokens; if it is
    faster than that allows for, these do not count.

    Args:
        contestants: those that take turns.
        limit: bytes for each process.
        prompt: what the text begins with.
        turns: repetitions that count.
        tokens: of a turn, at most: a slow contestant makes fewer (`tokens_within`).
        expected: tokens a second by name, which decide how many tokens a first turn has.
        done: is called as each turn ends.
        turn_s: seconds that generated tokens of a turn may take.
    """
    guard, speeds, hopeless, first = Guard(), dict(expected), dict[str, ProcessTurn](), 0

    def take(contestant: ProcessContestant) -> ProcessTurn:
        if contestant.name in hopeless:
            return hopeless[contestant.name]
        known = contestant.name in speeds
        count = tokens_within(speeds.get(contestant.name, 0.0), tokens, turn_s)
        with guard.turn() as load:
            outcome = contestant.take(prompt, count, limit)
            more = tokens_within(outcome.tokens_per_s, tokens, turn_s)
            if outcome.verdict == RAN and not known and more > count:
                outcome = contestant.take(prompt, more, limit)
        turn = ProcessTurn(contestant.name, outcome, load)
        if outcome.verdict != RAN:
            hopeless[contestant.name] = turn
        elif not isnan(outcome.tokens_per_s):
            speeds[contestant.name] = outcome.tokens_per_s
        done(turn)
        return turn

    def repetition() -> list[ProcessTurn]:
        nonlocal first
        order = [*contestants[first % len(contestants) :], *contestants[: first % len(contestants)]]
        taken, first = {contestant.name: take(contestant) for contestant in order}, first + 1
        return [taken[contestant.name] for contestant in contestants]

    rounds = [repetition() for _ in range(turns)]
    guard.close()
    take_again(rounds, repetition, guard)
    return rounds


def tokens_within(speed: float, most: int, seconds: float = TURN_S) -> int:
    """Tokens of a turn: `LEAST`, doubled while that takes so many seconds at this speed; never more than `most`.

    Tokens from the disk read the same bytes each, so few of them tell the speed of a slow contestant. Powers of two
    let the texts of most turns have the same length, and the same hash.
    """
    count = LEAST
    while 2 * count <= min(most, speed * seconds):
        count *= 2
    return min(most, most if most <= speed * seconds else count)


def table(rounds: Sequence[Sequence[ProcessTurn]]) -> pd.DataFrame:
    """A row a contestant, in the order of the first round; numbers are medians over turns.

    Columns: way, verdict, tokens, those of `RANGES` with `_low` and `_high`, cpu_s, text and text_hash (of the first
    turn), note, turns, disturbed (the share of turns beside other work), evidence.
    """
    rows = []
    for number, turns in enumerate(rounds, 1):
        for turn in turns:
            numbers = vars(turn.outcome) | {"text_hash": turn.outcome.digest} | turn.load.columns()
            rows.append({"way": turn.name, "repetition": number} | numbers)
    found = summary(pd.DataFrame(rows), ["way"], RANGES)
    return found.assign(turns=len(rounds), evidence="measured").drop(columns=["others_cores", "stolen_cores"])


@dataclass
class OurRun(ProcessContestant):
    """`sparse-offload run` of a packed folder or a GGUF file, with further options of it."""

    name: str
    place: Path
    options: Sequence[str] = ()

    def take(self, prompt: str, tokens: int, limit: int) -> ProcessText:
        """Generate a text in a new process."""
        if missing() is None:
            for file in [self.place] if self.place.is_file() else filter(Path.is_file, self.place.rglob("*")):
                drop_pages(file)  # else they would not count for the group
        outcome = self._run(prompt, tokens, limit, confined=missing() is None)
        if outcome.verdict != KILLED:
            return outcome
        free = self._run(prompt, tokens, limit, confined=False)  # it may not have come as far as its own refusal
        return free if free.verdict == REFUSED else replace(outcome, note=f"it took more than {limit / MB:.0f} MB")

    def warm_up(self, prompt: str, limit: int) -> None:
        """Have the kernels compiled: it takes memory and time once a machine."""
        self._run(prompt, LEAST, limit + COMPILER, confined=False)

    def _run(self, prompt: str, tokens: int, limit: int, confined: bool) -> ProcessText:
        command = [sys.executable, "-P", "-m", "toolkit", "run", str(self.place), "--memory", f"{limit // 10**6}MB"]
        command += ["--prompt", "-", "--max-new-tokens", str(tokens), *self.options]  # of any length
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with MemoryGroup() if confined else nullcontext() as group, tempfile.TemporaryFile() as given:
            given.write(prompt.encode() + b"\n")  # the newline at the end is dropped
            given.seek(0)
            if group:
                group.limit(limit)
            enter = group and (lambda: group.add(os.getpid()))
            with subprocess.Popen(command, preexec_fn=enter, stdin=given, **pipes) as process:
                said, begun_s, cpu_s, text = _read_both(process, len(prompt.encode()))
        if process.returncode:
            verdict = KILLED if process.returncode in SIGNALS else REFUSED if process.returncode == 2 else FAILED
            return ProcessText(verdict, note=(said.strip().splitlines() or [""])[-1].removeprefix("error: "))
        return _outcome_of_run(said, text.removeprefix(prompt).strip(), begun_s, cpu_s)


def _read_both(process: subprocess.Popen, prompt_bytes: int) -> tuple[str, float, float, str]:
    """A process's words on stderr, and the text on stdout, which begins with a prompt of so many bytes.

    Besides, seconds until the first letter on stdout, and CPU seconds after the first letter that follows the prompt.
    """
    started_s, said, text = time.perf_counter(), list[bytes](), b""
    begun_s = first_cpu_s = nan
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()))
    reader.start()
    while chunk := os.read(process.stdout.fileno(), 1 << 16):
        begun_s = begun_s if text else time.perf_counter() - started_s
        text += chunk
        if isnan(first_cpu_s) and len(text) > prompt_bytes:
            first_cpu_s = _cpu_s(process.pid)
    reader.join()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, its counters are still there
    cpu_s = _cpu_s(process.pid) - first_cpu_s
    process.wait()
    return said[0].decode(errors="replace"), begun_s, cpu_s, text.decode(errors="replace")


def _cpu_s(process: int) -> float:
    times = psutil.Process(process).cpu_times()
    return times.user + times.system


def _outcome_of_run(said: str, text: str, begun_s: float, cpu_s: float = nan) -> ProcessText:
    """The numbers that `run` prints after a text, which it begins to print `begun_s` after its start.

    `cpu_s` are CPU seconds after the first token.
    """
    count = int(_number(r"^(\d+) tokens? in ", said))
    first_s, rate = (_number(pattern, said) for pattern in (r"the first after ([\d.]+) s", r"then ([\d.]+) a second"))
    read_mb = _number(r"^ +read .* ([\d.]+)$", said)
    peak_mb = _number(r"^peak (\d+) of", said)
    held = re.search(r"[^;\n]*(layers in DRAM|of the experts|of the neurons)[^;\n]*", said)
    return ProcessText(
        RAN,
        count,
        rate,
        begun_s + first_s,
        0.0 if isnan(read_mb) else read_mb / count,
        peak_mb,
        cpu_s / (count - 1) if count > 1 else nan,
        text,
        held[0].strip() if held else "",
    )


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text, re.MULTILINE)
    return float(match[1]) if match else nan


@dataclass
class LlamaCppRun(ProcessContestant):
    """llama.cpp with a GGUF file at its best.

    Its first turn at a limit begins with a trial of all `loads`, a process each and a line each. Loads that came near
    the fastest (`NEAR`) take the turns, and the fastest of a turn counts. `encode` and `decode` are those of the
    model's tokenizer.
    """

    name: str
    file: Path
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    loads: Sequence[str] = tuple(llama_cpp.LOADS)

    def __post_init__(self) -> None:
        """All loads may be the best one yet."""
        self._near: dict[int, Sequence[str]] = {}
        self._is_mixture = any(EXPERTS in name for name in read_header(self.file).tensors)

    def take(self, prompt: str, tokens: int, limit: int) -> ProcessText:
        """Generate a text in a new process for each load that is near the fastest."""
        if limit not in self._near and len(self.loads) > 1:
            trial = self._try(prompt, min(tokens, LEAST), limit)
            if trial.verdict != RAN or trial.tokens == tokens:
                return trial
        loads = self._near.get(limit, self.loads)
        return _fastest([self._load(load, prompt, tokens, limit) for load in loads])

    def _try(self, prompt: str, tokens: int, limit: int) -> ProcessText:
        """The outcome of the fastest load; notes which ones are near it."""
        least_s, fastest_s = TRIAL_S + self.file.stat().st_size / OPENED_PER_S, threading.TIMEOUT_MAX / BEHIND
        outcomes: dict[str, ProcessText] = {}
        for load in self.loads:
            begun_s = time.perf_counter()
            outcomes[load] = outcome = self._load(load, prompt, tokens, limit, max(least_s, BEHIND * fastest_s))
            if outcome.verdict == RAN:
                fastest_s = min(fastest_s, time.perf_counter() - begun_s)
            speed = f"llama.cpp, {load}: {outcome.tokens_per_s:.3g} tokens/s in a trial of {outcome.tokens}"
            tell(speed if outcome.verdict == RAN else outcome.note)
        fastest = _fastest(list(outcomes.values()))
        if fastest.verdict == RAN:
            near_s = NEAR * fastest.tokens_per_s
            self._near[limit] = [load for load, outcome in outcomes.items() if outcome.tokens_per_s >= near_s]
        return fastest

    def _load(
        self, load: str, prompt: str, tokens: int, limit: int, most_s: float = threading.TIMEOUT_MAX
    ) -> ProcessText:
        confined, inputs = missing() is None, list(self.encode(prompt))
        if confined:
            drop_pages(self.file)  # else they would not count for the group
        try:
            done = run_process(self.file, limit if confined else None, load, inputs, tokens, most_s=most_s)
        except UserError as error:
            return ProcessText(KILLED if isinstance(error, NoRoom) else FAILED, note=str(error))
        if confined and done.read_bytes < self._least_reads(limit):
            return ProcessText(FAILED, note=f"{load}: it read {done.read_bytes / MB:.0f} MB a token. {SHARED}")
        text = (self.decode(done.tokens) if len(done.tokens) else done.text).strip()
        numbers = done.tokens_per_s, done.opened_s, done.read_bytes / MB, done.own_bytes / MB, done.cpu_s
        return ProcessText(RAN, tokens, *numbers, text, f"{load}, {done.build.partition(';')[0]}")

    def _least_reads(self, limit: int) -> float:
        """Bytes that a token cannot help reading; with less, pages of the file are in memory that is not its own."""
        needed = sum(end - first for first, end in llama_cpp.pinned_ranges(self.file, self.file.stat().st_size))
        return 0.0 if self._is_mixture else SURE * (needed - limit)


def _fastest(outcomes: Sequence[ProcessText]) -> ProcessText:
    """The fastest of those that ran; the first one if none did."""
    return max(outcomes, key=lambda outcome: outcome.tokens_per_s if outcome.tokens else -inf)
