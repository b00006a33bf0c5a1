"""Ways of bringing a token through a model whose FFNs lie on disk by neuron (LLM in a flash, table 2)."""

from dataclasses import dataclass

IN_MEMORY = 0.5  # of the model's bytes (FLASH, section 4.1)


@dataclass(frozen=True)
class NeuronWay:
    """The weights that a way keeps in memory, and those that it reads.

    `resident` is the share of the model that always stays, attention first; None means attention alone. `predicted`:
    only the neurons that the predictor names are read. `windowed`: those of the last tokens stay. `layout` of the FFNs.
    """

    resident: float | None
    predicted: bool
    windowed: bool
    layout: str


# each adds a technique to the one before it
WAYS = {
    "naive": NeuronWay(0.0, False, False, "bundled"),
    "hybrid": NeuronWay(IN_MEMORY, False, False, "bundled"),
    "predictor": NeuronWay(None, True, False, "split"),
    "windowing": NeuronWay(None, True, True, "split"),
    "bundling": NeuronWay(None, True, True, "bundled"),
}
