"""Contestants that take token ids through a decoder, pass by pass: this toolkit's runtime, and what others share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toolkit.measure.contestant import Contestant, Reference
from toolkit.offload.model import OffloadedModel
from toolkit.policies.ways import Way
from toolkit.storage.direct import drop_pages
from toolkit.storage.store import Store


@dataclass(frozen=True, eq=False)
class Text:
    """Token ids for each pass, int64 [batch, tokens], and the logits of the last ones that each pass must give.

    With `cached`, each pass continues the text of those before it; otherwise each begins a new one.
    """

    inputs: Sequence[Tensor]
    reference: Reference
    cached: bool = True


class Decoding(Contestant):
    """A contestant whose `model`, in the form of Hugging Face, gets the text. A token of the turn is one pass."""

    model: nn.Module
    exact = True  # all bits of the logits must be those of the reference

    def __init__(self, name: str, text: Text, labels: Mapping[str, object]):
        self.name, self.text, self.labels = name, text, labels

    @torch.no_grad()
    def token(self, number: int) -> Tensor:
        """One pass. Returns the logits of the last tokens, [batch, vocabulary]."""
        past = self._past if number else None
        output = self.model(self.text.inputs[number], past_key_values=past, use_cache=self.text.cached)
        self._past = output.past_key_values
        return output.logits[:, -1]

    def check(self, number: int, output: Tensor) -> None:
        """Raise `UserError` for other logits than those of the text."""
        self.text.reference.check(self.name, number, output, self.exact)


class Streamed(Decoding):
    """A packed model of a verified store in this toolkit's runtime, on the CPU.

    `settings` go to `OffloadedModel.open`, such as `placement`. Without `staged` a token is a single span.
    """

    def __init__(
        self, store: Store, way: Way, text: Text, labels: Mapping[str, object], staged: bool = True, **settings: object
    ):
        super().__init__(f"{way.method}, {way.policy},", text, labels)
        self.store, self.way, self.settings, self.staged = store, way, settings, staged
        self.exact = not way.stored.used_packed
        self.memory = settings.get("dram_bytes") or float("inf")

    @contextmanager
    def open(self) -> Iterator[None]:
        """The model, whose files are closed afterwards, so that every read has ended and is recorded."""
        settings = {"policy": self.way.policy, "verify": False} | self.settings
        with OffloadedModel.open(self.store.folder, self.way.method, **settings) as opened:
            layers = zip(self.store.layers_of(self.way.stored.format), opened.placement.tiers, strict=True)
            self.nbytes = sum(layer.nbytes for layer, tier in layers if tier == "storage")
            self.model, self.mode = opened.model, opened.mode if self.nbytes else "memory"
            self.recorder = opened.recorder if self.staged else None
            yield
        del self.model

    def prepare(self) -> None:
        """Drop the files from the page cache, unless reads bypass it."""
        if self.nbytes and self.mode != "direct":
            for file in self.store.files(self.way.stored.format).values():
                drop_pages(file.path)
