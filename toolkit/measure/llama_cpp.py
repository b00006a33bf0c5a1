"""llama.cpp on a model of ours, as a user would run it from disk: a GGUF file that is mapped into memory.

    rival = LlamaCpp("llama.cpp Q8_0", model, folder)
    take_turns([rival, ...], repetitions=5)
    rival.close()

PyPI's package `xllamacpp` has llama.cpp built for any x86-64 CPU with AVX2. It lives in an environment of its own under
`data/cache/environments/`, and runs in a process of its own (`llama_cpp_driver`). If it cannot run on this machine,
`missing()` says why. Its memory is limited by a memory cgroup (`memory_group`). Without a limit the pages of all layers
are dropped before each token, which is stricter: none is kept. Embeddings and head stay in memory then, as ours do.
"""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.cache import cached
from toolkit.errors import UserError
from toolkit.interchange.gguf import layer_bytes, layer_span, write_gguf
from toolkit.measure import llama_cpp_driver, memory_group
from toolkit.measure.child import PIP, WHEELS, Child, run_installer
from toolkit.measure.contestant import Contestant, Reference, Text
from toolkit.measure.memory_group import MemoryGroup
from toolkit.policies.methods import LLAMA_CPP
from toolkit.storage.direct import drop_pages
from toolkit.timeline import ReportedTime

PACKAGE, VERSION = "xllamacpp", "2026.10.11549"
MODE = "mmap, pages dropped"
LIMITED = "mmap, memory cgroup"
SETTLED = 0.02  # of the layers' bytes: passes that differ less in what they read are in the steady state
MOST_PASSES = 10  # before it
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
    """llama.cpp itself, compiled. Raises `UserError` if it cannot be installed."""
    return next(interpreter().parents[1].glob(f"lib/python*/site-packages/{PACKAGE}/*.so"))


class LlamaCpp(Contestant):
    """A Llama decoder in llama.cpp, its weights mapped from a GGUF file of the type that `method` names.

    It takes the token ids of `text`, or `PROMPT[:1]` again and again; each pass begins a new text. Pages are read when
    products touch them, so a pass is one span of stage `read`, of llama.cpp's own clock. `held_bytes` are the pages of
    its file that memory has room for. With `memory_bytes`, a memory cgroup holds what llama.cpp needs beside weights
    (measured after a pass: Python, KV cache, buffers, page tables) and so many bytes more for pages of the file, as
    many as another runtime may take for weights (`memory`). Passes that are not timed come first, until one reads as
    much as the one before it. Without it nothing limits the memory, but the layers' pages are dropped before each pass.

    Making it writes the file into `folder`, unless `model` is None and the file is there, and starts the process, with
    as many threads as torch has. With `gguf`, that file is run instead, of whatever type and architecture; `model`
    gives the size of the vocabulary. Logits of `PROMPT` are checked then and after each turn, up to `TOLERANCE`. F16
    must give the logits of the model in memory; `gguf`, and types that change the weights, must give the same ones each
    time. Types with a K get repeated blocks (`llama_cpp_quantiser.repeated`), which serve timing only. `nbytes` are
    those of the layers in the file. Unless `mapped`, the file is read into memory and repacked for llama.cpp's quickest
    products, which is its default. Raises `UserError` if llama.cpp cannot be installed or cannot run the file, for
    wrong logits, for a model of another kind than Llama, or for a limit where no memory cgroup can be made.
    """

    def __init__(
        self,
        method: str,
        model: nn.Module | None,
        folder: Path,
        text: Text | None = None,
        labels: Mapping[str, object] | None = None,
        mapped: bool = True,
        memory_bytes: int | None = None,
        gguf: Path | None = None,
    ):
        self.name, self.text, self.labels, self.mapped = method, text, labels or {}, mapped
        self.limited, python = memory_bytes is not None, interpreter()
        self.mode = LIMITED if self.limited else MODE if mapped else "memory"
        self.recorder = ReportedTime()
        file = gguf or folder / f"{LLAMA_CPP[method]}.gguf"
        if gguf is None and model is not None:
            write_gguf(model, file, LLAMA_CPP[method], _quantise(method))
        self.held_bytes = min(memory_bytes or float("inf"), file.stat().st_size)
        self.nbytes, self._dropped = layer_bytes(file), None if self.limited else layer_span(file)
        with open(file, "rb") as written:
            os.fsync(written.fileno())  # only pages that are on the disk can be dropped
        drop_pages(file)  # pages in the page cache would not count for its group
        context = sum(inputs.shape[1] for inputs in text.inputs) if text else len(PROMPT)
        command = [python, "-I", "-B", llama_cpp_driver.__file__, file, str(torch.get_num_threads()), str(context)]
        command += [] if mapped else [llama_cpp_driver.LOADED]
        self._group, self._child = None, Child(self.name, command)
        try:
            if self.limited:
                self._group = MemoryGroup()
                self._group.add(self._child.process.pid)
            self._child.answer()
            if model is not None:
                self._logits = _logits(model)
                lossless = gguf is None and LLAMA_CPP[method] == "F16"
                of_model = ("the model in memory", [self._logits]) if lossless else ("before",)
                self.reference = Reference(*of_model, tolerance=TOLERANCE)
                self.check(0)
            if self._group:
                self.memory = memory_bytes
                self._settle(self._group, memory_bytes)
        except BaseException:
            self.close()
            raise

    def token(self, number: int) -> None:
        """One pass from the disk. If the file is in memory, one of the tokens that llama.cpp generates in one call."""
        inputs = self.text.inputs[number][0].tolist() if self.text else PROMPT[:1]
        if self.mapped:
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

    def _settle(self, group: MemoryGroup, memory_bytes: int) -> None:
        """Limit the memory; then pass until a pass reads as much as the one before it."""
        before, now = float("inf"), self._pass(PROMPT[:1])["read_bytes"]
        group.limit(group.other_bytes + memory_bytes)
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


@functools.cache
def interpreter() -> Path:
    """The interpreter of llama.cpp's environment, which is made first if need be."""
    return cached("environments", {"package": PACKAGE, "version": VERSION}, (), _install) / "bin" / "python"


def _install(folder: Path) -> None:
    python, package = folder / "bin" / "python", f"{PACKAGE}=={VERSION}"
    installed = [sys.executable, "-m", "venv", folder], [python, *PIP, *WHEELS, package]
    for command in (*installed, [python, "-I", "-B", "-c", f"import {PACKAGE}"]):
        run_installer(f"llama.cpp ({PACKAGE} {VERSION})", command)
