"""A model whose parts come from disk when tokens need them, as a contestant: FFNs by neuron, or mixtures by expert."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from toolkit.measure.decoding import Decoding, Text
from toolkit.offload.model import OffloadedModel


class PartsModel(Decoding):
    """A folder of `pack_neurons` or `pack_experts` in this toolkit's runtime. A turn begins with no part in memory.

    `settings` go to `OffloadedModel.open`, such as `residency`; `made` are those that each turn needs anew, such as
    predictors with a state: a function that makes them, by name.
    """

    exact = False  # neurons are added up in the order in which they lie in memory

    def __init__(
        self,
        name: str,
        folder: Path,
        text: Text,
        labels: Mapping[str, object],
        made: Mapping[str, Callable[[], object]] | None = None,
        **settings: object,
    ):
        super().__init__(name, text, labels)
        self.folder, self.made, self.settings = folder, made or {}, {"verify": False} | settings
        self.memory = settings.get("dram_bytes") or float("inf")

    @contextmanager
    def open(self) -> Iterator[None]:
        """The model, whose files are closed afterwards."""
        made = {name: make() for name, make in self.made.items()}
        with OffloadedModel.open(self.folder, **made, **self.settings) as opened:
            self.model, self.mode, self.recorder = opened.model, opened.mode, opened.recorder
            yield
        del self.model
