"""How long this machine takes for a token, by how weights are stored, how many bytes they have, and in how many layers.

    found = rates()
    found.token["endor_packed", "bfloat16"].seconds(layers=30, nbytes=4.0e6 * 30)    # of one token, all in DRAM
    found.expert[4].seconds(1, 1.5e6)                                                # of one expert of 4 bits, in DRAM
    found.read.seconds(4.0e6)                                                        # from disk

Small Llama and Mixtral decoders of random weights run in the toolkit's own runtime, first in DRAM and then from disk,
so times have all that the runtime adds to its products. None of these decoders has the size of a model that is
predicted.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from toolkit import paths
from toolkit.files import make_folder, scratch_folder
from toolkit.machines.fit import non_negative
from toolkit.machines.machine import GB
from toolkit.measure.contestant import Contestant, Reference
from toolkit.measure.decoding import Text
from toolkit.measure.line import Line, fit_line
from toolkit.measure.llama_cpp import LlamaCpp, missing
from toolkit.measure.turns import measured, take_turns, timeline_of
from toolkit.models import decoder_blocks
from toolkit.planner import stand_ins
from toolkit.planner.ways import BFLOAT16, EXPERTS, STREAMED, PlannedWay, ways
from toolkit.policies.methods import LLAMA_CPP, PACKED
from toolkit.policies.placement import LayerMap
from toolkit.storage.store import Store

# hidden size, FFN, layers: 7, 26 and 103 MB a layer in 16 bits; few and many layers show what a token takes beside them
SIZES = ((512, 1536, 32), (1024, 2816, 8), (2048, 5632, 3))
RIVALS_SIZES = ((512, 1536, 8), *SIZES[1:])  # the outputs of a deep random model in F16 are too far from bfloat16's
HEAD, VOCABULARY = 64, 256
REPETITIONS, TOKENS, SKIPPED = 3, 6, 2
SAME = [torch.tensor([[stand_ins.TOKEN]])] * (SKIPPED + TOKENS)  # of random weights only time is of interest
SPARSITY = 0.5  # of the ways with zeros that are timed
TIMED = list(
    {
        (way.method, way.dtype): way
        for way in ways(experts=False)
        if way.sparsity in (0, SPARSITY) and way.kind == STREAMED
    }.values()
)
DENSE = (f"dense{PACKED}", BFLOAT16)  # method and type
READ_BY = next(way for way in TIMED if (way.method, way.dtype) == DENSE)
MIXTURES = ((512, 1792, 6), (1024, 3584, 3))  # hidden size, width of an expert, layers
KEYS = ("method", "dtype", "layers")
FASTEST_GB_S = 1000.0  # where the fit finds that bytes take no time at all
USED_EXPERTS = 2  # so that the first token brings all of them


@dataclass(frozen=True)
class Cost:
    """Seconds of a token: `token_s`, for each layer (or expert) `layer_s`, and all bytes at `gb_s`."""

    token_s: float
    layer_s: float
    gb_s: float

    def seconds(self, layers: float, nbytes: float) -> float:
        """Of a token that passes so many layers with so many bytes in all."""
        return self.token_s + layers * self.layer_s + nbytes / GB / self.gb_s


@dataclass(frozen=True)
class Rates:
    """What a token takes in DRAM by (method, dtype), in llama.cpp by type, of experts by bits; and a read from disk.

    `rival` is empty where llama.cpp cannot run. `token_s` of an expert is 0. `disturbed` is the share of turns beside
    other work.
    """

    token: Mapping[tuple[str, str], Cost]
    expert: Mapping[int, Cost]
    rival: Mapping[str, Cost]
    read: Line
    disturbed: float = 0.0


def are_kept() -> bool:
    """Whether this machine was measured already."""
    return layer_times(make=False) is not None and mixture_times(make=False) is not None


def rates(fresh: bool = False) -> Rates:
    """The rates of this machine, measured once, in about two minutes, and kept."""
    tables = [layer_times, mixture_times, *([] if missing() else [rival_times])]
    layers, mixtures, *rivals = times = [table(fresh=fresh) for table in tables]
    read = layers[layers["stage"] == "read"]
    found = {key: _cost(rows) for key, rows in layers[layers["stage"] == "token"].groupby(["method", "dtype"])}
    dense = found[DENSE]
    beside = [dense.seconds(row.layers, row.layers * row.dense_bytes) for row in mixtures.itertuples()]
    each = mixtures.assign(beside_s=beside, layers=mixtures["layers"] * USED_EXPERTS)
    experts = {int(bits): _cost(rows, rows["beside_s"]) for bits, rows in each.groupby("bits")}
    timed = {name: _cost(rows) for table in rivals for name, rows in table.groupby("method")}
    disturbed = pd.concat(times)["disturbed"].mean()
    return Rates(found, experts, timed, fit_line(read["nbytes"], read["seconds"]), float(disturbed))


def _cost(rows: pd.DataFrame, beside_s: pd.Series | None = None) -> Cost:
    """The costs with the least squares of relative errors, none below zero; without `token_s` if that stands beside."""
    count, total = rows["layers"].to_numpy(float), rows["seconds"].to_numpy(float)
    terms = [count, count * rows["nbytes"].to_numpy(float) / GB]
    terms = [np.ones_like(count), *terms] if beside_s is None else terms
    wanted = np.ones_like(total) if beside_s is None else 1 - beside_s.to_numpy(float) / total
    found = non_negative(np.stack([term / total for term in terms], axis=1), wanted)
    token_s, layer_s, byte_s = found if beside_s is None else (0.0, *found)
    return Cost(token_s, layer_s, 1 / max(byte_s, 1 / FASTEST_GB_S))


@measured
def layer_times() -> pd.DataFrame:
    """A row for each method, size and stage, the median of the turns.

    Columns: stage ("token": one token, all in DRAM; "read": one layer from the disk), method, dtype, layers, nbytes (of
    a layer, as stored), seconds, disturbed (share of turns).
    """
    return pd.concat([_of_size(*size) for size in SIZES], ignore_index=True)


@measured
def mixture_times() -> pd.DataFrame:
    """A row for each size and bits: a token of a mixture whose experts are all in DRAM, the median of the turns.

    Columns: bits, layers, nbytes (of one expert, as stored), dense_bytes (of a layer's other matrices), seconds,
    disturbed.
    """
    return pd.concat([_of_mixture(*size) for size in MIXTURES], ignore_index=True)


@measured
def rival_times() -> pd.DataFrame:
    """A row for each type of llama.cpp and size: one token, all in DRAM, the median of the turns.

    Columns: method, layers, nbytes (of a layer, as stored), seconds, disturbed.
    """
    return pd.concat([_of_rivals(*size) for size in RIVALS_SIZES], ignore_index=True)


def _of_rivals(hidden: int, ffn: int, layers: int) -> pd.DataFrame:
    with scratch_folder(make_folder(paths.cache_dir())) as folder, ExitStack() as stack:
        model, racing = _twin(hidden, ffn, layers), []
        for name in LLAMA_CPP:
            rival = LlamaCpp(name, model, folder, Text(SAME, Reference(name)), mapped=False)
            stack.callback(rival.close)
            rival.labels = {"method": name, "layers": layers, "layer_bytes": rival.nbytes // layers}
            racing.append(rival)
        spans = take_turns(racing, REPETITIONS, TOKENS, SKIPPED, stay_open=True)
    return _rows("token", spans, "method", "layers")


def _of_size(hidden: int, ffn: int, layers: int) -> pd.DataFrame:
    model = _twin(hidden, ffn, layers)
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        places = [stand_ins.packed(model, way, folder) for way in TIMED]
        racing = [_held(place, way, layers) for place, way in zip(places, TIMED, strict=True)]
        spans = take_turns(racing, REPETITIONS, TOKENS, SKIPPED, warm_up=1)
        in_dram = _rows("token", spans, *KEYS)
        reader = _held(stand_ins.packed(model, READ_BY, folder), READ_BY, layers, on_disk=True)
        spans = take_turns([reader], REPETITIONS, TOKENS, SKIPPED)
    return pd.concat([in_dram, _rows("read", spans[spans["stage"] == "read"], *KEYS)])


def _held(folder: Path, way: PlannedWay, layers: int, on_disk: bool = False) -> Contestant:
    nbytes = Store.open(folder).layer(0, way.stored.format).nbytes
    labels = {"method": way.method, "dtype": way.dtype, "layers": layers, "layer_bytes": nbytes}
    where = LayerMap(0, 0, layers) if on_disk else LayerMap(0, layers, 0)
    return stand_ins.contestant(folder, way, SAME, labels, staged=on_disk, placement=where)


def _rows(stage: str, spans: pd.DataFrame, *keys: str) -> pd.DataFrame:
    """Medians of the spans' seconds. A token in DRAM is one span."""
    spans = spans.assign(stage=stage, seconds=spans["end_s"] - spans["start_s"])
    return _medians(spans, ["stage", *keys, "layer_bytes"]).rename(columns={"layer_bytes": "nbytes"})


def _twin(hidden: int, ffn: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(hidden, ffn, layers))).bfloat16().eval().requires_grad_(False)


def _of_mixture(hidden: int, ffn: int, layers: int) -> pd.DataFrame:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"num_local_experts": USED_EXPERTS, "num_experts_per_tok": USED_EXPERTS}
    model = MixtralForCausalLM(MixtralConfig(**_sizes(hidden, ffn, layers), **sizes)).bfloat16().eval()
    model.requires_grad_(False)
    attention = decoder_blocks(model)[0].self_attn
    dense_bytes = sum(weight.nbytes for weight in attention.parameters())
    racing = []
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        for way in [way for way in ways(experts=True) if way.kind == EXPERTS]:
            place = stand_ins.packed(model, way, folder)
            nbytes = next(iter(Store.open(place).index.ops)).nbytes
            labels = {"bits": way.bits, "layers": layers, "expert_bytes": nbytes, "dense_bytes": dense_bytes}
            racing.append(stand_ins.contestant(place, way, SAME, labels))
        spans = take_turns(racing, REPETITIONS, TOKENS, SKIPPED, warm_up=1)
    keys, rows = ["bits", "layers", "expert_bytes", "dense_bytes"], []
    for labels, turn in spans.groupby([*keys, "repetition"]):
        seconds = timeline_of(turn).total_s / TOKENS
        rows.append(
            {**dict(zip(keys, labels, strict=False)), "seconds": seconds, "disturbed": turn["disturbed"].iloc[0]}
        )
    return _medians(pd.DataFrame(rows), keys).rename(columns={"expert_bytes": "nbytes"})


def _medians(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    return rows.groupby(keys, as_index=False).agg(seconds=("seconds", "median"), disturbed=("disturbed", "mean"))


def _sizes(hidden: int, ffn: int, layers: int) -> dict[str, int]:
    """The configuration of a small Llama or Mixtral decoder."""
    heads = {"num_attention_heads": hidden // HEAD, "num_key_value_heads": hidden // HEAD}
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    return sizes | heads
