"""This toolkit's runtime as a contestant: a packed model whose layers, neurons or experts come from the disk."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from toolkit.measure.contestant import Decoding, Text
from toolkit.offload.model import OffloadedModel
from toolkit.offload.ways import POLICIES, Way


class PackedModel(Decoding):
    """A packed folder, already verified, in this toolkit's runtime on the CPU. Each turn opens it anew.

    `way` has method and policy of whole layers; None stands for a folder of neurons or experts. Without `staged` a
    token is a single span. `settings` go to `OffloadedModel.open`, such as `placement`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        text: Text,
        labels: Mapping[str, object],
        way: Way | None = None,
        staged: bool = True,
        **settings: object,
    ):
        super().__init__(name, text, labels)
        self.folder, self.way, self.staged, self.settings = folder, way, staged, settings
        self.exact = way is not None and not way.stored.used_packed  # neurons are added up as they lie in memory
        self.memory = settings.get("dram_bytes") or float("inf")
        self.reads_ahead = way is not None and POLICIES[way.policy].overlaps

    @contextmanager
    def open(self) -> Iterator[None]:
        """The model, whose files are closed afterwards, so that every read has ended and is recorded."""
        settings = {"verify": False} | ({"method": self.way.method, "policy": self.way.policy} if self.way else {})
        with OffloadedModel.open(self.folder, **settings | self.settings) as opened:
            self.model, self.mode, self.recorder = opened.model, opened.mode, opened.recorder if self.staged else None
            forms = [self.way.stored.format] if self.way else []
            if self.way:
                layers = zip(opened.store.layers_of(*forms), opened.placement.tiers, strict=True)
                self.nbytes = sum(layer.nbytes for layer, tier in layers if tier == "storage")
                self.mode = self.mode if self.nbytes else "memory"
            shards = opened.store.files(*forms).values() if self.mode == "buffered" else ()
            self.files = [shard.path for shard in shards]
            self.held_bytes = opened.budgets["dram"].used_bytes  # of the limit
            yield
        del self.model

    def prepare(self) -> None:
        """As for any contestant, unless reads go on between tokens."""
        if not self.reads_ahead:
            super().prepare()

    def token(self, number: int) -> Tensor:
        """One pass. The clock runs while pages are dropped if the next layer is read meanwhile."""
        if self.reads_ahead:
            super().prepare()
        return super().token(number)
