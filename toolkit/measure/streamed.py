"""This toolkit's runtime as a contestant: a packed model whose layers are streamed from the disk or held in DRAM."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from toolkit.measure.decoding import Decoding, Text
from toolkit.offload.model import OffloadedModel
from toolkit.policies.ways import POLICIES, Way
from toolkit.storage.direct import drop_pages
from toolkit.storage.store import Store


class StreamedModel(Decoding):
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
        """Drop the files from the page cache, unless reads bypass it or go on between tokens."""
        if not self._reads_ahead:
            self._drop_pages()

    def token(self, number: int) -> Tensor:
        """One pass. The clock runs while pages are dropped if the next layer is read meanwhile."""
        if self._reads_ahead:
            self._drop_pages()
        return super().token(number)

    @property
    def _reads_ahead(self) -> bool:
        return POLICIES[self.way.policy].overlaps

    def _drop_pages(self) -> None:
        if self.nbytes and self.mode != "direct":
            for file in self.store.files(self.way.stored.format).values():
                drop_pages(file.path)
