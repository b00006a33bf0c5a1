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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import pandas as pd
import torch
from torch import nn

from toolkit import memory_limits, paths
from toolkit.costs.fit import non_negative
from toolkit.costs.machine import GB
from toolkit.files import make_folder, scratch_folder
from toolkit.formats.twins import random_blocks
from toolkit.kernels.blocks import LAYOUTS
from toolkit.measure.llama_cpp import missing
from toolkit.measure.packed_model import PackedModel
from toolkit.measure.rates import Line, fit_line
from toolkit.measure.turns import measured, take_turns
from toolkit.models import decoder_blocks
from toolkit.planner import stand_ins
from toolkit.planner.ways import BFLOAT16, EXPERTS, NEURONS, RIVAL, STREAMED, WHOLE, ZEROS, PlannedWay, ways
from toolkit.policies.methods import GGUF, LLAMA_CPP, PACKED
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import POLICIES
from toolkit.storage.neuron_packing import LAYOUT
from toolkit.storage.store import Store

# hidden size, FFN, layers: 7 and 103 MB a layer in 16 bits. In 3 bits, too, the first and the last are more than caches
# hold, which would make larger models look faster than they are; the second tells what a token takes beside its layers
SIZES = ((512, 1536, 24), (512, 1536, 4), (2048, 5632, 3))
RIVALS_SIZES = ((1024, 2816, 8), (2048, 5632, 2))  # in F16 a deeper random model is too far from bfloat16
NEURONS_SIZES = ((512, 1536, 2), (1024, 2816, 2), (2048, 5632, 1))
HEAD, VOCABULARY = 64, 256
BLOCKS_BYTES, COLUMNS, BLOCKS_S = 1 << 26, 4096, 0.25  # more bytes than caches hold
REPETITIONS, TOKENS, SKIPPED, FILLING = 3, 6, 2, 6  # neurons need more tokens before those that count
READS, TOKENS_READ = 1, 4
SAME = [torch.tensor([[stand_ins.TOKEN]])] * (SKIPPED + TOKENS)  # of random weights only time is of interest
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
MIXTURES = ((512, 1792, 6, 2), (512, 1792, 6, 4), (1024, 3584, 3, 2))  # hidden size, an expert's width, layers, experts
BY_NEURON = next(way for way in ways(experts=False, zeros=ZEROS) if way.kind == NEURONS)
FFN_OPS = ("predictor", "ffn")
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


@dataclass(frozen=True)
class Rates:
    """The time of a token in DRAM by (method, dtype), in llama.cpp by type, of experts by bits; and a read from disk.

    `expert`, `neuron` and `neuron_read` are times of one layer: of its experts, of a layer by neuron without its reads,
    and of these reads. `rival` is empty where llama.cpp cannot run. `blocks` are GB/s of products with matrices of GGUF
    files, by the type of their blocks. `slowdown` is the time that products lose for each second of reads beside them:
    the disk writes into the same memory, and its driver needs a core. `disturbed` is the share of turns beside other
    work.
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
    """Whether what `rates` measures was measured already."""
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
        blocks=(times[GGUF].set_index("method")["nbytes"] / times[GGUF].set_index("method")["seconds"] / GB).to_dict(),
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
    return ours | {RIVAL: rival_times, GGUF: block_times}


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
    return pd.concat([_of_size(*size) for size in SIZES], ignore_index=True)


@measured
def torch_times() -> pd.DataFrame:
    """The same of dense layers that go through torch, in DRAM alone."""
    by_torch = [replace(READ_BY[0], method=BY_TORCH)]
    return pd.concat([_of_size(*size, by_torch, []) for size in SIZES], ignore_index=True)


@measured
def neuron_times() -> pd.DataFrame:
    """A row for each size and token: one layer by neuron, the median of layers and turns.

    Columns: loaded (neurons that it reads), seconds (beside reading), nbytes (of the predictor, and of the neurons in
    memory, which it multiplies), read_s, read_bytes, disturbed.
    """
    return pd.concat([_of_neurons(*size) for size in NEURONS_SIZES], ignore_index=True)


@measured
def mixture_times() -> pd.DataFrame:
    """A row for each size and bits: a token of a mixture whose experts are all in DRAM, the median of the turns.

    Columns: bits, layers, used (experts of a layer), nbytes (of one expert, as stored), dense_bytes (of a layer's other
    matrices), seconds, disturbed.
    """
    return pd.concat([_of_mixture(*size) for size in MIXTURES], ignore_index=True)


@measured
def rival_times() -> pd.DataFrame:
    """A row for each type of llama.cpp and size: one token, all in DRAM, the median of the turns.

    Columns: method, layers, nbytes (of a layer, as stored), seconds, disturbed. Where llama.cpp cannot be installed, no
    row; that is kept, too, since an attempt takes minutes without a network.
    """
    if missing():
        return pd.DataFrame({name: [] for name in ("method", "layers", "nbytes", "seconds", "disturbed")})
    return pd.concat([_of_rivals(*size) for size in RIVALS_SIZES], ignore_index=True)


@measured
def block_times() -> pd.DataFrame:
    """A row for each type of blocks of GGUF files: the median product with a matrix of `BLOCKS_BYTES`.

    Columns: method (the type), nbytes, seconds, disturbed (not known).
    """
    x, rows = torch.ones(COLUMNS), []
    for name, layout in LAYOUTS.items():
        matrix = random_blocks(name, BLOCKS_BYTES // layout.row_bytes(COLUMNS), COLUMNS)
        matrix.matvec(x)  # compiles
        seconds: list[float] = []
        while sum(seconds) < BLOCKS_S:
            start = perf_counter()
            matrix.matvec(x)
            seconds.append(perf_counter() - start)
        rows.append({"method": name, "nbytes": matrix.nbytes, "seconds": median(seconds), "disturbed": nan})
    return pd.DataFrame(rows)


def _of_size(
    hidden: int, ffn: int, layers: int, in_dram: Sequence[PlannedWay] = TIMED, from_disk: Sequence[PlannedWay] = READ_BY
) -> pd.DataFrame:
    model, keys = _alike(hidden, ffn, layers), ["method", "dtype", "layers"]
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        racing = [_layers(model, way, folder, layers) for way in in_dram]
        if from_disk and (some := layers // ONE_READ_IN) > POLICIES[stand_ins.POLICY].slots:  # fewer would stay
            racing += [_layers(model, way, folder, layers, some) for way in in_dram]
        spans = _turns(racing, model).assign(stage=lambda table: np.where(table["read"], "partly", "token"))
        if from_disk:
            readers = [_layers(model, way, folder, layers, layers) for way in from_disk]
            read = take_turns(readers, READS, TOKENS_READ, 1)
            spans = pd.concat([spans, read[read["stage"] == "read"]])
    return _medians(spans, [*keys, "stage"])


def _layers(model: nn.Module, way: PlannedWay, folder: Path, layers: int, read: int = 0) -> PackedModel:
    """A contestant that reads so many of its layers. If it reads all, the stages of its tokens are timed."""
    where, staged = LayerMap(0, layers - read, read, spread=True), read == layers
    labels = {"method": way.method, "dtype": way.dtype, "layers": layers, "read": read}
    ours = stand_ins.contestant(model, way, folder, SAME, labels, staged=staged, placement=where)
    labels["unit_bytes"] = Store.open(ours.folder).layer(0, way.stored.format).nbytes
    return ours


def _of_rivals(hidden: int, ffn: int, layers: int) -> pd.DataFrame:
    model, racing = _twin(hidden, ffn, layers), []
    with scratch_folder(make_folder(paths.cache_dir())) as folder, ExitStack() as stack:
        for name in LLAMA_CPP:
            rival = stack.enter_context(stand_ins.rival(name, model, folder, SAME, {"method": name, "layers": layers}))
            rival.labels["unit_bytes"] = rival.nbytes // layers
            racing.append(rival)
        spans = take_turns(racing, REPETITIONS, TOKENS, SKIPPED, stay_open=True)
    return _medians(spans, ["method", "layers"])


def _of_mixture(hidden: int, ffn: int, layers: int, used: int) -> pd.DataFrame:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"num_local_experts": used, "num_experts_per_tok": used}  # the first token brings all
    model = MixtralForCausalLM(MixtralConfig(**_sizes(hidden, ffn, layers), **sizes)).bfloat16().eval()
    model.requires_grad_(False)
    dense_bytes = sum(weight.nbytes for weight in decoder_blocks(model)[0].self_attn.parameters())
    racing = []
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        for way in [way for way in ways(experts=True) if way.kind == EXPERTS and way.runs_here]:
            labels = {"bits": way.bits, "layers": layers, "used": used, "dense_bytes": dense_bytes}
            racing.append(stand_ins.contestant(model, way, folder, SAME, labels, staged=False))
            labels["unit_bytes"] = next(iter(Store.open(racing[-1].folder).index.ops)).nbytes
        spans = _turns(racing, model)
    return _medians(spans, ["bits", "layers", "used", "dense_bytes"])


def _of_neurons(hidden: int, ffn: int, layers: int) -> pd.DataFrame:
    model, text = _twin(hidden, ffn, layers), torch.arange(stand_ins.CALIBRATED) % VOCABULARY
    ids = text[torch.randperm(len(text), generator=torch.Generator().manual_seed(0))]
    tokens = ids[: FILLING + TOKENS].view(-1, 1, 1)
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        ours = stand_ins.contestant(model, BY_NEURON, folder, list(tokens), {}, ids)
        stored = Store.open(ours.folder).layer(0, LAYOUT)
        spans = take_turns([ours], REPETITIONS, TOKENS, FILLING)
    neuron_bytes = stored.nbytes // next(iter(stored.ops.values())).shape[0]
    spans = spans.assign(reads=spans["stage"] == "read")
    spans = spans[spans["reads"] | (spans["stage"] == "manage") | spans["op"].isin(FFN_OPS)]
    passes = ["repetition", "token", "layer"]
    sums = spans.groupby([*passes, "reads"])[["seconds", "nbytes"]].sum().unstack("reads", fill_value=0)
    columns = {"seconds": ("seconds", False), "nbytes": ("nbytes", False)}
    columns |= {"read_s": ("seconds", True), "read_bytes": ("nbytes", True)}
    found = pd.DataFrame({name: sums[column] for name, column in columns.items()})
    found = found[found["read_s"] > 0].groupby("token").median().reset_index(drop=True)
    return found.assign(loaded=found["read_bytes"] / neuron_bytes, disturbed=spans["disturbed"].mean())


def _turns(racing: list[PackedModel], model: nn.Module) -> pd.DataFrame:
    """Turns of contestants that are opened once, if memory holds all: opening takes longer than a turn."""
    together = len(racing) * sum(weight.nbytes for weight in model.parameters())
    return take_turns(racing, REPETITIONS, TOKENS, SKIPPED, stay_open=together < memory_limits.free_bytes())


def _medians(spans: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The median seconds of the spans, of which a token in DRAM has one, and the share of those disturbed."""
    spans = spans.groupby([*keys, "unit_bytes"], as_index=False)
    table = spans.agg(seconds=("seconds", "median"), disturbed=("disturbed", "mean"))
    return table.rename(columns={"unit_bytes": "nbytes"})


def _twin(hidden: int, ffn: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(hidden, ffn, layers))).bfloat16().eval().requires_grad_(False)


def _alike(hidden: int, ffn: int, layers: int) -> nn.Module:
    """The same, but all layers have the first one's weights: to draw them all would take longer than the turns."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = LlamaForCausalLM(LlamaConfig(**_sizes(hidden, ffn, layers))).bfloat16().eval().requires_grad_(False)
    first, *others = model.model.layers
    for part in (first, model.model.embed_tokens, model.lm_head):
        for weight in part.parameters():
            if weight.ndim > 1:
                weight.normal_(0, model.config.initializer_range)
    for layer in others:
        layer.load_state_dict(first.state_dict(), assign=True)
    return model


def _sizes(hidden: int, ffn: int, layers: int) -> dict[str, int]:
    """The configuration of a small Llama or Mixtral decoder."""
    heads = {"num_attention_heads": hidden // HEAD, "num_key_value_heads": hidden // HEAD}
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    return sizes | heads
