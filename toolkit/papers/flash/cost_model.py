"""The cost model of neurons on disk: a token's reads (LLM in a flash, table 2), and whole tokens (table 3).

    neuron_reads(profile("flash-m1-max"), Reads("opt-6.7b", layers=32), "bundling")
    neuron_tokens(profile("flash-m1-max"), "cpu")

Long reads take their bytes over the disk's bandwidth. Scattered reads of a layer are a burst: each takes its share of
`Storage.read_gb_s`, and the last one ends a latency after the disk has begun it, unless the rates of a profile are of
whole tokens (`thread_gb_s`) and have such waits in them. Nothing is read ahead, since the predictor needs the layer's
input.

A whole token has three parts. It reads as above, or all bytes (half, by `hybrid`) at the rate of long reads. Then it
manages memory, at a rate for the bytes that it loads. Then it computes: dense weights at one rate, FFNs of which few
neurons fire at another, over all their bytes. The two rates of a processor are taken from OPT 6.7B, naive and with all
techniques; other models, and totals, are predicted. Bytes are counted in 16 bits, whatever the CPU computes in.
"""

from dataclasses import dataclass, replace

import pandas as pd

from toolkit.errors import UserError, unknown
from toolkit.machines.hardware import profile
from toolkit.machines.machine import GB, NOTHING, Memory, Profile
from toolkit.machines.null_model import links_only
from toolkit.machines.schedule import Step, schedule
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.shapes import neuron_bytes, part_bytes
from toolkit.sparsity.synthetic import UsageLaw
from toolkit.timeline import Timeline

PROCESSORS = {"cpu": ("dram", 4), "gpu": ("device", 2)}  # the memory it computes from, and bytes of a value it loads
MACHINES = (("flash-m1-max", "cpu"), ("flash-m1-max", "gpu"), ("flash-m2-ultra", "gpu"), ("flash-rtx4090", "gpu"))
THREADS = 32

IN_MEMORY = 0.5  # of the model's bytes (FLASH, section 4.1)


@dataclass(frozen=True)
class StorageScheme:
    """A storage scheme: how a token comes through a model whose FFNs lie on disk by neuron (FLASH, table 2).

    `resident` is the share of the model that always stays, attention first; None means attention alone. `predicted`:
    only the neurons that the predictor names are read. `windowed`: those of the last tokens stay. `layout` of the FFNs.
    """

    resident: float | None
    predicted: bool
    windowed: bool
    layout: str


# each adds a technique to the one before it
SCHEMES = {
    "naive": StorageScheme(0.0, False, False, "bundled"),
    "hybrid": StorageScheme(IN_MEMORY, False, False, "bundled"),
    "predictor": StorageScheme(None, True, False, "split"),
    "windowing": StorageScheme(None, True, True, "split"),
    "bundling": StorageScheme(None, True, True, "bundled"),
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
    """One token by a scheme of `SCHEMES` on a machine.

    Raises `UserError` for an unknown way or model, a machine without storage, or a disk of unknown latency where reads
    are short.
    """
    if way not in SCHEMES:
        raise unknown("way", way, SCHEMES)
    if machine.storage is None:
        raise UserError(f"{machine.id} has no storage: expected a machine with a disk")
    scheme, sizes = SCHEMES[way], part_bytes(reads.model, reads.element_bytes)
    whole = reads.layers * sum(sizes.values())
    if not scheme.predicted:
        read_bytes = (1 - scheme.resident) * whole
        long = _read(read_bytes / (machine.storage.bandwidth_gb_s * GB), read_bytes)
        return TokenReads(read_bytes, 0, schedule([long]), scheme.resident * whole)
    share = reads.new if scheme.windowed else reads.active
    chunk = neuron_bytes(reads.model, reads.element_bytes, scheme.layout)
    read_bytes = reads.layers * share * sizes["ffn"]
    bursts = _read(read_bytes / (machine.storage.read_gb_s(chunk, reads.depth) * GB), read_bytes)
    waits = _read(reads.layers * machine.storage.latency_s if machine.storage.thread_gb_s is None else 0)
    held = reads.layers * (sizes["attention"] + _held_share(reads, scheme.windowed) * sizes["ffn"])
    return TokenReads(read_bytes, read_bytes / chunk, schedule([bursts, waits]), held)


def _read(seconds: float, nbytes: float = 0) -> Step:
    """A step of all layers' reads together: nothing runs beside them."""
    return Step("read", "neurons", "storage", "disk", seconds, round(nbytes))


def _held_share(reads: Reads, windowed: bool) -> float:
    """The share of a layer's neurons in memory: with a window of k, memory for k + 1 tokens (FLASH, appendix C.1)."""
    if not windowed:
        return reads.active
    law = UsageLaw.fit(reads.active, reads.new, reads.window)
    return law.aggregated(reads.window + 1)


@dataclass(frozen=True)
class Loads:
    """A model of FLASH: the share of its FFNs that a token loads (None: not published), and what hybrid loading reads.

    `chunks` is the number of rows that are read together.
    """

    new: float | None
    hybrid: float = 0.5
    chunks: int = 2


MODELS = {
    "opt-6.7b": Loads(0.024),
    "falcon-7b": Loads(0.031),
    "persimmon-8b": Loads(None),
    "phi-2": Loads(None, hybrid=0.35),
    "llama2-7b": Loads(None, hybrid=0.45, chunks=3),
}


def null_machine(machine: Profile) -> Profile:
    """The machine by bytes over bandwidth: of the disk, and of the memories for everything else."""
    bare = links_only(machine)
    memories = {part: replace(getattr(machine, part), matvec_gb_s=NOTHING) for part in ("dram", "device")}
    return replace(bare, **memories)


def neuron_tokens(machine: Profile, processor: str) -> pd.DataFrame:
    """A row a model and way (naive, hybrid, all): io_ms, memory_ms, compute_ms, total_ms, and speedup over naive.

    NaN where the paper gives no share of loaded neurons. A GPU has OPT 6.7B alone, and no hybrid loading, as in the
    paper. A disk of unknown latency reads chunks at the rate of long reads.
    """
    rows = []
    for name, loads in MODELS.items():
        for way in ("naive", "hybrid", "all"):
            if processor == "cpu" or (name == "opt-6.7b" and way != "hybrid"):
                rows.append({"model": name, "way": way, **_parts_ms(machine, processor, name, loads, way)})
    table = pd.DataFrame(rows)
    table["total_ms"] = table[["io_ms", "memory_ms", "compute_ms"]].sum(axis=1, skipna=False)
    naive = table[table["way"] == "naive"].set_index("model")["total_ms"]
    labels = {"profile": machine.id, "processor": processor, "evidence": "modelled"}
    return table.assign(speedup=table["model"].map(naive) / table["total_ms"], **labels)


def _parts_ms(machine: Profile, processor: str, model: str, loads: Loads, way: str) -> dict[str, float]:
    memory_name, value_bytes = PROCESSORS[processor]
    memory: Memory = getattr(machine, memory_name)
    weights = ARCHITECTURES[model].parameters
    whole = 2 * (weights["attention"] + weights["ffn"] + weights["embedding"])
    if way != "all":
        read_bytes = whole * (1 if way == "naive" else loads.hybrid)
        parts = read_bytes / machine.storage.bandwidth_gb_s, 0.0, GB * memory.matvec_s("dense", whole)
    else:
        ffn = 2 * weights["ffn"]
        loaded = weights["ffn"] * value_bytes * (float("nan") if loads.new is None else loads.new)
        chunk = loads.chunks * ARCHITECTURES[model].hidden * value_bytes
        disk = machine.storage
        read_gb_s = disk.bandwidth_gb_s if disk.latency_s is None else disk.read_gb_s(chunk, THREADS)
        managed = machine.software.manage_gb_s if machine.software else memory.bandwidth_gb_s
        computed = memory.matvec_s("dense", whole - ffn) + memory.matvec_s("neurons", ffn)
        parts = loaded / read_gb_s, loaded / managed, GB * computed
    return {name: 1e3 * part / GB for name, part in zip(("io_ms", "memory_ms", "compute_ms"), parts, strict=True)}


def papers_tokens() -> tuple[pd.DataFrame, pd.DataFrame]:
    """All machines of the paper, by this model and by the null model."""
    pairs = [(profile(name), processor) for name, processor in MACHINES]
    tables = [(neuron_tokens(machine, which), neuron_tokens(null_machine(machine), which)) for machine, which in pairs]
    model, null = (pd.concat(each, ignore_index=True) for each in zip(*tables, strict=True))
    return model, null
