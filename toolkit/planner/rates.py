"""The time of a token on this machine, by the storage format of the weights, their bytes and the number of layers.

    found = rates()
    found.token["endor_packed", "bfloat16"].seconds(layers=30, nbytes=4.0e6 * 30)    # of one token, all in DRAM
    found.expert[4].seconds(1, 1.5e6)                                                # of one expert of 4 bits, in DRAM
    found.neuron.seconds(40, 2.0e6)                                                  # of a layer that reads 40 neurons
    found.read.seconds(4.0e6)                                                        # from disk

Small Llama and Mixtral decoders of random weights run in the toolkit's own runtime, first in DRAM and then from disk,
so times include everything that the runtime adds to its products. None of these decoders has the size of a model that
is predicted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from toolkit.machines.fit import non_negative
from toolkit.machines.machine import GB
from toolkit.measure.llama_cpp import missing
from toolkit.measure.turns import measured
from toolkit.offload.methods import PACKED
from toolkit.papers.endor.rates import Line, fit_line
from toolkit.planner.ways import BFLOAT16, EXPERTS, NEURONS, RIVAL, STREAMED, WHOLE, ways

# hidden size, FFN, layers: 7 and 103 MB a layer in 16 bits. In 3 bits, too, the first and the last are more than caches
# hold, which would make larger models look faster than they are; the second tells what a token takes beside its layers
SIZES = ((512, 1536, 24), (512, 1536, 4), (2048, 5632, 3))
RIVALS_SIZES = ((1024, 2816, 8), (2048, 5632, 2))  # in F16 a deeper random model is too far from bfloat16
NEURONS_SIZES = ((512, 1536, 2), (1024, 2816, 2), (2048, 5632, 1))
SPARSITY = 0.5  # of the ways with zeros that are timed
TIMED = list(
    {
        (way.method, way.dtype): way
        for way in ways(experts=False)
        if way.sparsity in (0, SPARSITY) and way.kind == STREAMED and way.head == WHOLE
    }.values()
)
DENSE, BY_TORCH = f"dense{PACKED}", "dense"  # methods
READ_BY = [way for way in TIMED if way.method == DENSE]  # of both types, since small reads are slower
MIXTURE_SHAPES = (
    (512, 1792, 6, 2),
    (512, 1792, 6, 4),
    (1024, 3584, 3, 2),
)  # hidden size, an expert's width, layers, experts
ONE_READ_IN = 8  # of so many layers one is read while products go on: reads take less time than they
FASTEST_GB_S = 1000.0  # where the fit finds that bytes take no time at all


@dataclass(frozen=True)
class Cost:
    """Seconds: `once_s` once, `each_s` for each layer (or expert, or neuron), and all bytes at `gb_s`."""

    once_s: float
    each_s: float
    gb_s: float

    def seconds(self, layers: float, nbytes: float) -> float:
        """Seconds of so many layers (or experts, or neurons) with so many bytes in all."""
        return self.once_s + layers * self.each_s + nbytes / GB / self.gb_s


class BlockRates(dict[str, float]):
    """GB/s of products with blocks of GGUF files, by type. A type is measured when it is first asked for, and kept.

    A file has two or three types; to compile the kernels of all takes 20 seconds.
    """

    def __init__(self, fresh: bool = False):
        super().__init__()
        self.fresh = fresh

    def __missing__(self, kind: str) -> float:
        """The rate of a type. Raises `KeyError` for one that there are no kernels for."""
        row = block_times(kind, fresh=self.fresh).iloc[0]
        self[kind] = float(row["nbytes"] / row["seconds"] / GB)
        return self[kind]


@dataclass(frozen=True)
class Rates:
    """The time of a token in DRAM by (method, dtype), in llama.cpp by type, of experts by bits; and a read from disk.

    `expert`, `neuron` and `neuron_read` are times of one layer: of its experts, of a layer by neuron without its reads,
    and of these reads. `rival` is empty where llama.cpp cannot run. `blocks` are GB/s of products with matrices of GGUF
    files, by the type of their blocks (`BlockRates`). `slowdown` is the time that products lose for each second of
    reads beside them: the disk writes into the same memory, and its driver needs a core. `disturbed` is the share of
    turns beside other work.
    """

    token: Mapping[tuple[str, str], Cost]
    read: Line
    expert: Mapping[int, Cost]
    neuron: Cost
    neuron_read: Cost
    rival: Mapping[str, Cost] = field(default_factory=dict)
    blocks: Mapping[str, float] = field(default_factory=dict)
    slowdown: float = 0.0
    disturbed: float = 0.0


def are_kept() -> bool:
    """Whether what `rates` measures at once was measured already."""
    return all(measure(make=False) is not None for measure in _measures().values())


def rates(fresh: bool = False) -> Rates:
    """The rates of this machine, of all kinds of ways: measured once and kept, or again if `fresh`."""
    times = {kind: measure(fresh=fresh) for kind, measure in _measures().items()}
    layers, neurons = pd.concat([times[STREAMED], times[BY_TORCH]]), times[NEURONS]
    reads = layers[layers["stage"] == "read"]
    read = fit_line(reads["nbytes"], reads["seconds"])
    token = {
        key: _cost(rows["seconds"], 1, rows["layers"], rows["layers"] * rows["nbytes"])
        for key, rows in layers[layers["stage"] == "token"].groupby(["method", "dtype"])
    }
    long_s = neurons["read_bytes"] / GB / read.gb_s  # short reads move their bytes no faster than long ones
    by_read = replace(_cost(neurons["read_s"], 1, neurons["loaded"], 0.0, long_s), gb_s=read.gb_s)
    return Rates(
        token,
        read,
        expert=dict(_experts_costs(times[EXPERTS], token[DENSE, BFLOAT16])),
        neuron=_cost(neurons["seconds"], 1, neurons["loaded"], neurons["nbytes"]),
        neuron_read=by_read,
        rival=dict(_rivals_costs(times[RIVAL])),
        blocks=BlockRates(fresh),
        slowdown=_slowdown(layers, read),
        disturbed=float(pd.concat(times.values())["disturbed"].mean()),
    )


def _slowdown(times: pd.DataFrame, read: Line) -> float:
    """The mean over ways, since the difference of two tokens is small."""
    keys = ["method", "dtype", "layers", "nbytes"]
    stages = times.pivot_table(values="seconds", index=keys, columns="stage").reset_index()
    tokens = stages[stages["partly"].notna()]
    read_s = [row.layers // ONE_READ_IN * read.seconds(row.nbytes) for row in tokens.itertuples()]
    return max(0.0, float(((tokens["partly"] - tokens["token"]) / read_s).mean()))


def _measures() -> dict[str, Callable[..., pd.DataFrame]]:
    """The measurements by the kind of ways that they are for.

    `BY_TORCH` is for layers that go through torch, as those of a model do that is not built like Llama.
    """
    ours = {STREAMED: layer_times, BY_TORCH: torch_times, NEURONS: neuron_times, EXPERTS: mixture_times}
    return ours | {RIVAL: rival_times}


def _rivals_costs(times: pd.DataFrame) -> Iterator[tuple[str, Cost]]:
    for name, rows in times.groupby("method"):
        yield name, _cost(rows["seconds"], 0, rows["layers"], rows["layers"] * rows["nbytes"])


def _experts_costs(times: pd.DataFrame, dense: Cost) -> Iterator[tuple[int, Cost]]:
    """The time of a token in the mixture of one layer, by bits, beside the layers' other matrices."""
    beside = [dense.seconds(row.layers, row.layers * row.dense_bytes) for row in times.itertuples()]
    for bits, rows in times.assign(beside_s=beside).groupby("bits"):
        used = rows["layers"] * rows["used"]
        yield int(bits), _cost(rows["seconds"], rows["layers"], used, used * rows["nbytes"], rows["beside_s"])


def _cost(
    seconds: pd.Series,
    once: pd.Series | float,
    count: pd.Series,
    nbytes: pd.Series | float,
    beside_s: pd.Series | float = 0.0,
) -> Cost:
    """The cost with the least squares of relative errors, none of its parts below zero; `beside_s` is taken off."""
    terms = np.stack([np.broadcast_to(term, len(seconds)) / seconds for term in (once, count, nbytes / GB)], axis=1)
    once_s, each_s, byte_s = non_negative(terms, np.asarray(1 - beside_s / seconds))
    return Cost(once_s, each_s, 1 / max(byte_s, 1 / FASTEST_GB_S))


@measured
def layer_times() -> pd.DataFrame:
    """A row for each method, size and stage, the median of the turns.

    Columns: stage ("token": one token, all in DRAM; "read": one layer from the disk; "partly": a token that reads one
    layer in `ONE_READ_IN`), method, dtype, layers, nbytes (of a layer, as stored), seconds, disturbed (share of turns).
    """
    from toolkit.planner import timing

    return pd.concat([timing.of_size(*size) for size in SIZES], ignore_index=True)


@measured
def torch_times() -> pd.DataFrame:
    """The same of dense layers that go through torch, in DRAM alone."""
    from toolkit.planner import timing

    by_torch = [replace(READ_BY[0], method=BY_TORCH)]
    return pd.concat([timing.of_size(*size, by_torch, []) for size in SIZES], ignore_index=True)


@measured
def neuron_times() -> pd.DataFrame:
    """A row for each size and token: one layer by neuron, the median of layers and turns.

    Columns: loaded (neurons that it reads), seconds (beside reading), nbytes (of the predictor, and of the neurons in
    memory, which it multiplies), read_s, read_bytes, disturbed.
    """
    from toolkit.planner import timing

    return pd.concat([timing.of_neurons(*size) for size in NEURONS_SIZES], ignore_index=True)


@measured
def mixture_times() -> pd.DataFrame:
    """A row for each size and bits: a token of a mixture whose experts are all in DRAM, the median of the turns.

    Columns: bits, layers, used (experts of a layer), nbytes (of one expert, as stored), dense_bytes (of a layer's other
    matrices), seconds, disturbed.
    """
    from toolkit.planner import timing

    return pd.concat([timing.of_mixture(*size) for size in MIXTURE_SHAPES], ignore_index=True)


@measured
def rival_times() -> pd.DataFrame:
    """A row for each type of llama.cpp and size: one token, all in DRAM, the median of the turns.

    Columns: method, layers, nbytes (of a layer, as stored), seconds, disturbed. Where llama.cpp cannot be installed, no
    row; that is kept, too, since an attempt takes minutes without a network.
    """
    if missing():
        return pd.DataFrame({name: [] for name in ("method", "layers", "nbytes", "seconds", "disturbed")})
    from toolkit.planner import timing

    return pd.concat([timing.of_rivals(*size) for size in RIVALS_SIZES], ignore_index=True)


@measured
def block_times(kind: str) -> pd.DataFrame:
    """A row: the median product with a matrix of blocks of a type of GGUF files.

    Columns: method (the type), nbytes, seconds, disturbed (not known). Raises `KeyError` for a type without kernels.
    """
    from toolkit.planner import block_timing

    return block_timing.of_blocks(kind)
