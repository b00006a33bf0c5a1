"""A contestant: one way of doing the work that `toolkit.measure.turns` times, such as running a model from the disk.

`Decoding` takes token ids through a decoder, pass by pass; the ids are a `Text`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models.cached_pass import CACHE, cached_pass
from toolkit.storage.direct import drop_pages
from toolkit.timeline import Recorder, Span, Timeline


class Contestant(ABC):
    """One way of doing the same work as others, token by token. Only `token` must be written.

    - name: for error messages;
    - labels: the columns that tell its rows from those of others;
    - nbytes: bytes read for one token; if it reads nothing, bytes of the weights that it multiplies;
    - files: those read through the page cache, whose pages are dropped before each token;
    - memory: the bytes of memory that it may take at most, infinite without a limit;
    - mode: how it reads: "direct" past the page cache, "buffered" through it, "memory" not at all, or in words;
    - build: of another program, which build of it runs, and the CPU's instructions that it uses;
    - recorder: has the stages of each token; without one, a token is a single span of stage `compute`;
    - turn: its own numbers of counted and of skipped tokens, for a contestant whose tokens take long;
    - text: its token ids, for a contestant that takes any;
    - reference, exact: what `check` compares outputs with, and whether all bits must agree.
    """

    name: str = ""
    labels: Mapping[str, object] = {}
    nbytes: int = 0
    files: Sequence[Path] = ()
    memory: float = float("inf")
    mode: str = "memory"
    build: str = ""
    recorder: Recorder | None = None
    turn: tuple[int, int] | None = None
    text: "Text | None" = None
    reference: "Reference | None" = None
    exact: bool = True

    def open(self) -> AbstractContextManager:
        """Prepare a turn: load a model, say. It is not timed."""
        return nullcontext()

    def prepare(self) -> None:
        """The untimed steps before each token."""
        for file in self.files:
            drop_pages(file)

    @abstractmethod
    def token(self, number: int) -> object:
        """Token `number` of a turn, from 0. Returns what `check` judges."""

    def check(self, number: int, output: object) -> None:
        """Raise `UserError` unless the output equals that of the reference. It is called when the turn is over."""
        if self.reference:
            self.reference.check(self.name, number, output, self.exact)

    def close(self) -> None:  # noqa: B027
        """Release what outlives a turn."""

    def now_s(self) -> float:
        """The contestant's clock. It may stand still where only others work."""
        return self.recorder.now_s() if self.recorder else time.perf_counter()

    def window(self, begun_s: float, ended_s: float) -> Timeline:
        """The spans between two instants of its clock, with times counted from the first. Called after `open`."""
        if self.recorder:
            return self.recorder.timeline().window(begun_s, ended_s)
        return Timeline((Span("compute", "token", "dram", 0.0, ended_s - begun_s, self.nbytes),), "measured")


class Reference:
    """The outputs that contestants must give, token by token; without `outputs`, the first that is given for a token.

    `source` names them in the error. Products with packed weights add in another order, so theirs may differ by
    `tolerance` of the largest output; all others must have the same bits.
    """

    def __init__(self, source: str, outputs: Sequence[Tensor] = (), tolerance: float = 0.0):
        self.source, self.tolerance, self._outputs = source, tolerance, dict(enumerate(outputs))

    def check(self, name: str, number: int, output: Tensor, exact: bool = True) -> None:
        """Raise `UserError` for another output than that of this token."""
        expected = self._outputs.setdefault(number, output)
        if exact or not self.tolerance:
            same = torch.equal(output, expected)
        else:
            difference = (output.float() - expected.float()).abs().max()
            same = output.shape == expected.shape and bool(difference <= self.tolerance * expected.abs().max())
        if not same:
            raise UserError(f"{name} gives another output than {self.source}: not timed")


@dataclass(frozen=True, eq=False)
class Text:
    """Token ids for each pass, int64 [batch, tokens], and the logits of the last ones that each pass must give.

    Without a reference, these are the logits of the first turn. With `cached`, each pass continues the text of those
    before it; otherwise each begins a new one.
    """

    inputs: Sequence[Tensor]
    reference: Reference = field(default_factory=lambda: Reference("the first turn"))
    cached: bool = True


@torch.no_grad()
def greedy_text(model: nn.Module, prompt: Tensor, passes: int, tolerance: float) -> Text:
    """A prompt [batch, tokens], then the likeliest token of each pass, with the logits of so many passes."""
    inputs, logits, past = [prompt], [], None
    for _ in range(passes):
        output = cached_pass(model, inputs[-1], past)
        past = getattr(output, CACHE)
        logits.append(output.logits[:, -1])
        inputs.append(logits[-1].argmax(-1, keepdim=True))
    return Text(inputs[:-1], Reference("the model in memory", logits, tolerance))


class Decoding(Contestant):
    """A contestant whose `model`, in the form of Hugging Face, gets the text. A token of the turn is one pass."""

    model: nn.Module

    def __init__(self, name: str, text: Text, labels: Mapping[str, object]):
        self.name, self.text, self.labels, self.reference = name, text, labels, text.reference

    @torch.no_grad()
    def token(self, number: int) -> Tensor:
        """One pass. Returns the logits of the last tokens, [batch, vocabulary]."""
        past = self._past if number else None
        output = cached_pass(self.model, self.text.inputs[number], past, self.text.cached)
        self._past = getattr(output, CACHE)
        return output.logits[:, -1]
