"""llama.cpp on a model of ours, as a user would run it from disk: a GGUF file that is mapped into memory.

    rival = LlamaCpp("llama.cpp Q8_0", model, folder)
    take_turns([rival, ...], repetitions=5)
    rival.close()

It is the llama.cpp that was built for this machine (`llama_cpp_build`), if it was; otherwise PyPI's package
`xllamacpp`, built for any x86-64 CPU with AVX2. It lives in an environment of its own under `data/cache/environments/`,
and runs in a process of its own (`llama_cpp_driver`). If it cannot run on this machine, `missing()` says why. Its
memory is limited by a memory cgroup (`memory_group`). Without a limit the pages of all layers are dropped before each
token, which is stricter: none is kept. Embeddings and head stay in memory then, as ours do.

`LOADS` are the ways of running a file that an experienced user would try. All of them race; the quickest counts.
Neither build streams the experts of a mixture from disk: llama.cpp's pull request 25294, which does, is not merged.
"""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.cache import cached
from toolkit.errors import UserError, unknown
from toolkit.interchange.gguf import layer_bytes, layer_span, write_gguf
from toolkit.measure import llama_cpp_build, llama_cpp_driver, memory_group
from toolkit.measure.child import PIP, WHEELS, Child, run_installer
from toolkit.measure.contestant import Contestant, Reference, Text
from toolkit.measure.memory_group import MemoryGroup
from toolkit.models.gguf_header import read_header
from toolkit.offload.methods import LLAMA_CPP
from toolkit.storage.direct import drop_pages
from toolkit.timeline import ReportedTime

PACKAGE, VERSION = "xllamacpp", "2026.10.11549"
# ways of running a file, each with the driver's way of loading it
LOADS = {
    "pinned": "mapped",  # as much of the mapped file is locked in memory as fits; often the best, so it comes first
    "mapped": "mapped",  # products read the file's pages
    "random": "mapped",  # the same without the system's read-ahead
    "repacked": "repacked",  # repacked copies beside the mapped file: llama.cpp's default
    "read": "read",  # repacked copies alone
}
PASSING_BYTES = 150_000_000  # left for pages that are read ahead and dropped after use; a quarter, if that is less
OWN_BYTES = 90_000_000  # of its process beside pages of the file and its key-value cache
DROPPED, LIMITED = "pages dropped", "memory cgroup"
SETTLED = 0.02  # of the layers' bytes: passes that differ less in what they read are in the steady state
MOST_PASSES = 10  # before it
EMBEDDING, HEAD, EXPERTS = "token_embd.weight", "output.weight", "_exps."
PROMPT = (7, 100, 55)  # what the logits are compared for: more than one token, so that positions play a part
TOLERANCE = 0.02  # of the largest logit: llama.cpp rounds the inputs of products to F16


def missing(limited: bool = False) -> str | None:
    """Why llama.cpp cannot run on this machine, or not in limited memory; None if it can. May install it, once."""
    return _not_installed() or (memory_group.missing() if limited else None)


@functools.cache
def _not_installed() -> str | None:
    """Why it cannot be installed, asked once a process: a failed installation takes minutes."""
    try:
        interpreter()
    except UserError as error:
        return str(error)
    return None


def library() -> Path:
    """llama.cpp itself, compiled, of the wheel. Raises `UserError` if it cannot be installed."""
    return next(_wheel().parents[1].glob(f"lib/python*/site-packages/{PACKAGE}/*.so"))


def command(file: Path, context: int, load: str) -> list[str | Path]:
    """The command that starts the driver with a file, for texts of so many tokens.

    Raises `UserError` for a `load` that is none of `LOADS`.
    """
    if load not in LOADS:
        raise unknown("way of llama.cpp to load a file", load, LOADS)
    driver = [interpreter(), "-I", "-B", llama_cpp_driver.__file__]
    return [*driver, file, str(torch.get_num_threads()), str(context), LOADS[load]]


def set_up(child: Child, file: Path, load: str, memory_bytes: int | None) -> None:
    """Pin as much of the file as `memory_bytes` hold (None: all of it), or turn its read-ahead off, as `load` says."""
    if load == "pinned":
        room = (
            file.stat().st_size if memory_bytes is None else max(0, memory_bytes - PASSING_BYTES, 3 * memory_bytes // 4)
        )
        child.ask(pin=pinned_ranges(file, room))
    elif load == "random":
        child.ask(random=True)


def pinned_ranges(file: Path, nbytes: int) -> list[tuple[int, int]]:
    """The parts of a file to pin, first and end, so many bytes in all: what every token needs, in the file's order.

    An embedding beside a head is left out, since a token needs one row of it; experts come last. Raises `UserError` for
    a piece of a split file.
    """
    header = read_header(file)
    if len(header.files) > 1:
        raise UserError(f"{file}: one of {len(header.files)} pieces; join them with llama-gguf-split --merge first")
    named = {name: tensor for name, tensor in header.tensors.items() if name != EMBEDDING}
    needed = named if HEAD in named else header.tensors
    ranges = []
    for name in sorted(needed, key=lambda name: (EXPERTS in name, needed[name].offset)):
        first, size = needed[name].offset, min(nbytes, needed[name].nbytes)
        if size:
            ranges.append((first, first + size))
        nbytes -= size
    return ranges


class LlamaCpp(Contestant):
    """A Llama decoder in llama.cpp, its weights mapped from a GGUF file of the type that `method` names.

    It takes the token ids of `text`, or `PROMPT[:1]` again and again; each pass begins a new text. Pages are read when
    products touch them, so a pass is one span of stage `read`, of llama.cpp's own clock. `held_bytes` are the pages of
    its file that memory has room for. With `memory_bytes`, a memory cgroup holds what llama.cpp needs beside weights
    (measured after a pass: Python, KV cache, buffers, page tables) and so many bytes more for pages of the file, as
    many as another runtime may take for weights (`memory`). Passes that are not timed come first, until one reads as
    much as the one before it. Without it nothing limits the memory, but the layers' pages are dropped before each pass.

    Making it writes the file into `folder`, unless it is there, of the same model, and starts the process, with as many
    threads as torch has. With `gguf`, that file is run instead, of whatever type and architecture; `model`
    gives the size of the vocabulary. Logits of `PROMPT` are checked then and after each turn, up to `TOLERANCE`. F16
    must give the logits of the model in memory; `gguf`, and types that change the weights, must give the same ones each
    time. Types with a K get repeated blocks (`llama_cpp_quantiser.repeated`), which serve timing only. `nbytes` are
    those of the layers in the file. `load` is one of `LOADS`; "read" is timed in memory, and "pinned" pins what the
    limit holds. `build` says which llama.cpp it is, and which instructions it uses. Raises `UserError` if llama.cpp
    cannot be installed or cannot run the file, for wrong logits, for a model of another kind than Llama, or for a limit
    where no memory cgroup can be made.
    """

    def __init__(
        self,
        method: str,
        model: nn.Module | None,
        folder: Path,
        text: Text | None = None,
        labels: Mapping[str, object] | None = None,
        load: str = "mapped",
        memory_bytes: int | None = None,
        gguf: Path | None = None,
    ):
        self.name, self.text, self.labels, self.load = method, text, labels or {}, load
        self.limited, self.recorder = memory_bytes is not None, ReportedTime()
        place = "mmap" if load == "mapped" else f"mmap {load}"
        self.mode = "memory" if load == "read" else f"{place}, {LIMITED if self.limited else DROPPED}"
        file = gguf or folder / f"{LLAMA_CPP[method]}.gguf"
        if gguf is None and model is not None and not file.exists():
            write_gguf(model, file, LLAMA_CPP[method], _quantise(method))
        self.held_bytes = min(memory_bytes or float("inf"), file.stat().st_size)
        self.nbytes, self._dropped = layer_bytes(file), None if self.limited else layer_span(file)
        with open(file, "rb") as written:
            os.fsync(written.fileno())  # only pages that are on the disk can be dropped
        drop_pages(file)  # pages in the page cache would not count for its group
        context = sum(inputs.shape[1] for inputs in text.inputs) if text else len(PROMPT)
        self._group, self._child = None, Child(self.name, command(file, context, load))
        try:
            if self.limited:
                self._group = MemoryGroup()
                self._group.add(self._child.process.pid)
            self.build = f"{which()}; {self._child.answer().get('build', '')}"
            if model is not None:
                self._logits = _logits(model)
                lossless = gguf is None and LLAMA_CPP[method] == "F16"
                of_model = ("the model in memory", [self._logits]) if lossless else ("before",)
                self.reference = Reference(*of_model, tolerance=TOLERANCE)
                self.check(0)
            if self._group:
                self.memory = memory_bytes
                self._settle(self._group, memory_bytes, file)
            else:
                set_up(self._child, file, load, None)
        except BaseException:
            self.close()
            raise

    def token(self, number: int) -> None:
        """One pass from the disk. If the file is in memory, one of the tokens that llama.cpp generates in one call."""
        inputs = self.text.inputs[number][0].tolist() if self.text else PROMPT[:1]
        if self.load != "read":
            answer = self._pass(inputs)
            self.recorder.report("read", "pass", "storage", answer["seconds"], answer["read_bytes"])
            return
        if number == 0:
            self._token_s = self.generated(inputs, len(self.text.inputs))
        self.recorder.report("compute", "pass", "dram", self._token_s, self.nbytes)

    def check(self, number: int, output: None = None) -> None:
        """Compare the logits of `PROMPT`, once a turn, when it is over: asking for them takes time."""
        if self.reference and number == 0:
            logits = self.log_probabilities(PROMPT, len(self._logits)) + self._logits.logsumexp(0)
            self.reference.check(self.name, 0, logits, exact=False)

    def generated(self, tokens: Sequence[int], count: int) -> float:
        """Seconds a token, of `count` that it picks after these, with the file in the page cache as it is."""
        return self._child.ask(tokens=list(tokens), generate=count)["seconds"]

    def likeliest(self, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens after these, one after the other."""
        return self._child.ask(tokens=list(tokens), text=count)["tokens"]

    def log_probabilities(self, tokens: Sequence[int], vocabulary: int) -> Tensor:
        """The natural logarithms of the next token's probabilities: fp32 [vocabulary]."""
        return torch.tensor(self._pass(tokens, probabilities=vocabulary)["log_probabilities"])

    def close(self) -> None:
        """End the process."""
        self._child.close()
        if self._group:
            self._group.close()

    def _settle(self, group: MemoryGroup, memory_bytes: int, file: Path) -> None:
        """Limit the memory; then pass until a pass reads as much as the one before it."""
        before, now = float("inf"), self._pass(PROMPT[:1])["read_bytes"]
        group.limit(group.other_bytes + memory_bytes)
        set_up(self._child, file, self.load, memory_bytes)
        for _ in range(MOST_PASSES):
            if abs(now - before) <= SETTLED * self.nbytes:
                break
            before, now = now, self._pass(PROMPT[:1])["read_bytes"]

    def _pass(self, tokens: Sequence[int], **request: object) -> dict:
        """Take tokens through the model in one pass. Without a limit, the layers' pages are dropped before."""
        return self._child.ask(tokens=list(tokens), drop=self._dropped, **request)


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    return model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1].float()


def _quantise(method: str):
    """The quantiser for types that the package `gguf` lacks; None for the others."""
    if not LLAMA_CPP[method].endswith("_K"):
        return None
    from toolkit.measure.llama_cpp_quantiser import repeated  # which needs this module

    return repeated


def which() -> str:
    """Which llama.cpp is measured, in words."""
    if llama_cpp_build.built():
        return f"{llama_cpp_build.PACKAGE} {llama_cpp_build.VERSION}, built for this CPU"
    return f"{PACKAGE} {VERSION}, a generic AVX2 build"


def interpreter() -> Path:
    """The interpreter of an environment that has llama.cpp: one built for this machine, or the wheel's.

    The latter is made first if need be. Raises `UserError` if it cannot be installed.
    """
    return llama_cpp_build.built() or _wheel()


@functools.cache
def _wheel() -> Path:
    return cached("environments", {"package": PACKAGE, "version": VERSION}, (), _install) / "bin" / "python"


def _install(folder: Path) -> None:
    python, package = folder / "bin" / "python", f"{PACKAGE}=={VERSION}"
    installed = [sys.executable, "-m", "venv", folder], [python, *PIP, *WHEELS, package]
    for command in (*installed, [python, "-I", "-B", "-c", f"import {PACKAGE}"]):
        run_installer(f"llama.cpp ({PACKAGE} {VERSION})", command)
