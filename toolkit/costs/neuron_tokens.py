"""The cost model of whole tokens whose neurons come from disk (LLM in a flash, table 3).

    neuron_tokens(profile("flash-m1-max"), "cpu")

A token reads, manages memory and computes, one after the other:

- it reads as `toolkit.costs.neuron_reads` has it, or all bytes (half, by `hybrid`) at the rate of long reads;
- memory is managed at a rate for the bytes that a token loads;
- dense weights are computed with at one rate, and FFNs of which few neurons fire at another, over all their bytes.

The two rates of a processor are taken from OPT 6.7B, naive and with all techniques; other models, and totals, are
predicted. Bytes are counted in 16 bits, whatever the CPU computes in.
"""

from dataclasses import dataclass, replace

import pandas as pd

from toolkit.costs.hardware import profile
from toolkit.costs.machine import GB, NOTHING, Memory, Profile, Storage
from toolkit.costs.null_model import links_only
from toolkit.models.architectures import ARCHITECTURES

PROCESSORS = {"cpu": ("dram", 4), "gpu": ("device", 2)}  # the memory it computes from, and bytes of a value it loads
MACHINES = (("flash-m1-max", "cpu"), ("flash-m1-max", "gpu"), ("flash-m2-ultra", "gpu"), ("flash-rtx4090", "gpu"))
THREADS = 32


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
        managed = machine.software.manage_gb_s if machine.software else memory.bandwidth_gb_s
        computed = memory.matvec_s("dense", whole - ffn) + memory.matvec_s("neurons", ffn)
        parts = loaded / _read_gb_s(machine.storage, chunk), loaded / managed, GB * computed
    return {name: 1e3 * part / GB for name, part in zip(("io_ms", "memory_ms", "compute_ms"), parts, strict=True)}


def _read_gb_s(disk: Storage, chunk: int) -> float:
    return disk.bandwidth_gb_s if disk.latency_s is None else disk.read_gb_s(chunk, THREADS)


def papers_tokens() -> tuple[pd.DataFrame, pd.DataFrame]:
    """All machines of the paper, by this model and by the null model."""
    pairs = [(profile(name), processor) for name, processor in MACHINES]
    tables = [(neuron_tokens(machine, which), neuron_tokens(null_machine(machine), which)) for machine, which in pairs]
    model, null = (pd.concat(each, ignore_index=True) for each in zip(*tables, strict=True))
    return model, null
