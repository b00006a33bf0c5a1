"""A model whose FFNs lie on disk by neuron, as a contestant: its predictors and the policy that keeps neurons vary."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.measure.decoding import Decoding, Text
from toolkit.offload.model import OffloadedModel
from toolkit.predictors import Foresight


class NeuronModel(Decoding):
    """A folder of `pack_neurons` in this toolkit's runtime. A turn begins with no neuron in memory.

    `predictors` makes those of a turn, one for each layer. `settings` go to `OffloadedModel.open`, such as `residency`.
    """

    exact = False  # neurons are added up in the order in which they lie in memory

    def __init__(
        self,
        name: str,
        folder: Path,
        predictors: Callable[[], Sequence[Foresight | None]],
        text: Text,
        labels: Mapping[str, object],
        **settings: object,
    ):
        super().__init__(name, text, labels)
        self.folder, self.predictors, self.settings = folder, predictors, {"verify": False} | settings
        self.memory = settings.get("dram_bytes") or float("inf")

    @contextmanager
    def open(self) -> Iterator[None]:
        """The model, whose files are closed afterwards."""
        with OffloadedModel.open(self.folder, predictors=self.predictors(), **self.settings) as opened:
            self.model, self.mode, self.recorder = opened.model, opened.mode, opened.recorder
            yield
        del self.model
