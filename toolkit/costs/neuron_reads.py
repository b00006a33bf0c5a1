"""The cost model of reading neurons: bytes, memory and read time of a token (LLM in a flash, table 2).

    neuron_reads(profile("flash-m1-max"), Reads("opt-6.7b", layers=32), "bundling")

Long reads take their bytes over the disk's bandwidth. Scattered reads of a layer are a burst: each takes its share of
`Storage.read_gb_s`, and the last one ends a latency after the disk has begun it, unless the rates of a profile are of
whole tokens (`thread_gb_s`) and have such waits in them. Nothing is read ahead, since the predictor needs the layer's
input.
"""

from dataclasses import dataclass

from toolkit.costs.machine import GB, Profile
from toolkit.costs.schedule import Step, schedule
from toolkit.errors import UserError, unknown
from toolkit.models.shapes import neuron_bytes, part_bytes
from toolkit.sparsity.synthetic import UsageLaw
from toolkit.timeline import Timeline

IN_MEMORY = 0.5  # of the model's bytes (FLASH, section 4.1)


@dataclass(frozen=True)
class NeuronWay:
    """A way of bringing a token through a model whose FFNs lie on disk by neuron (FLASH, table 2).

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


@dataclass(frozen=True)
class Reads:
    """The bytes and operations of one token in a model of `toolkit.models.shapes` with so many layers.

    `active` is the share of a layer's neurons that the predictor names, `new` the share of them that a token with a
    window of `window` reads, `element_bytes` the size of a weight, `depth` the number of short reads under way at once.
    """

    model: str
    layers: int
    active: float = 0.10
    new: float = 0.024
    window: int = 4
    element_bytes: int = 2
    depth: int = 32


@dataclass(frozen=True)
class TokenReads:
    """One token's bytes read, the number of reads (0: long ones), their times; and bytes of weights in memory."""

    read_bytes: float
    reads: float
    timeline: Timeline
    memory_bytes: float

    @property
    def seconds(self) -> float:
        """From the first read's start to the last one's end."""
        return self.timeline.total_s


def neuron_reads(machine: Profile, reads: Reads, way: str) -> TokenReads:
    """One token of a way of `WAYS` on a machine.

    Raises `UserError` for an unknown way or model, a machine without storage, or a disk of unknown latency where reads
    are short.
    """
    if way not in WAYS:
        raise unknown("way", way, WAYS)
    if machine.storage is None:
        raise UserError(f"{machine.id} has no storage: expected a machine with a disk")
    technique, sizes = WAYS[way], part_bytes(reads.model, reads.element_bytes)
    whole = reads.layers * sum(sizes.values())
    if not technique.predicted:
        read_bytes = (1 - technique.resident) * whole
        long = _read(read_bytes / (machine.storage.bandwidth_gb_s * GB), read_bytes)
        return TokenReads(read_bytes, 0, schedule([long]), technique.resident * whole)
    share = reads.new if technique.windowed else reads.active
    chunk = neuron_bytes(reads.model, reads.element_bytes, technique.layout)
    read_bytes = reads.layers * share * sizes["ffn"]
    bursts = _read(read_bytes / (machine.storage.read_gb_s(chunk, reads.depth) * GB), read_bytes)
    waits = _read(reads.layers * machine.storage.latency_s if machine.storage.thread_gb_s is None else 0)
    held = reads.layers * (sizes["attention"] + _held_share(reads, technique.windowed) * sizes["ffn"])
    return TokenReads(read_bytes, read_bytes / chunk, schedule([bursts, waits]), held)


def _read(seconds: float, nbytes: float = 0) -> Step:
    """A step of all layers' reads together: nothing runs beside them."""
    return Step("read", "neurons", "storage", "disk", seconds, round(nbytes))


def _held_share(reads: Reads, windowed: bool) -> float:
    """The share of a layer's neurons in memory: with a window of k, memory for k + 1 tokens (FLASH, appendix C.1)."""
    if not windowed:
        return reads.active
    law = UsageLaw.fit(reads.active, exponent=1, new=reads.new, tokens=reads.window + 1)
    return law.aggregated(reads.window + 1)
