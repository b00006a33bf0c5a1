"""The measurements behind this machine's rates: turns of small decoders.

Only a measurement needs the runtime, whose imports take seconds; `toolkit.planner.rates` has what a plan reads.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from toolkit import memory_limits, paths
from toolkit.files import make_folder, scratch_folder
from toolkit.measure.packed_model import PackedModel
from toolkit.measure.turns import take_turns
from toolkit.models import decoder_blocks
from toolkit.offload.methods import LLAMA_CPP
from toolkit.offload.placement import LayerMap
from toolkit.offload.ways import POLICIES
from toolkit.planner import stand_ins
from toolkit.planner.rates import ONE_READ_IN, READ_BY, TIMED
from toolkit.planner.ways import EXPERTS, NEURONS, ZEROS, PlannedWay, ways
from toolkit.storage.neuron_packing import LAYOUT
from toolkit.storage.store import Store

HEAD, VOCABULARY = 64, 256
REPETITIONS, TOKENS, SKIPPED, FILLING = 3, 6, 2, 6  # neurons need more tokens before those that count
READ_TURNS, TOKENS_READ = 1, 4
SAME = [torch.tensor([[stand_ins.TOKEN]])] * (SKIPPED + TOKENS)  # of random weights only time is of interest
BY_NEURON = next(way for way in ways(experts=False, zeros=ZEROS) if way.kind == NEURONS)
FFN_OPS = ("predictor", "ffn")


def of_size(
    hidden: int, ffn: int, layers: int, in_dram: Sequence[PlannedWay] = TIMED, from_disk: Sequence[PlannedWay] = READ_BY
) -> pd.DataFrame:
    """The times of a size, as `layer_times` has them; `in_dram` and `from_disk` are the ways that are timed."""
    model, keys = _alike(hidden, ffn, layers), ["method", "dtype", "layers"]
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        racing = [_layers(model, way, folder, layers) for way in in_dram]
        if from_disk and (some := layers // ONE_READ_IN) > POLICIES[stand_ins.POLICY].slots:  # fewer would stay
            racing += [_layers(model, way, folder, layers, some) for way in in_dram]
        spans = _turns(racing, model).assign(stage=lambda table: np.where(table["read"], "partly", "token"))
        if from_disk:
            readers = [_layers(model, way, folder, layers, layers) for way in from_disk]
            read = take_turns(readers, READ_TURNS, TOKENS_READ, 1)
            spans = pd.concat([spans, read[read["stage"] == "read"]])
    return _medians(spans, [*keys, "stage"])


def _layers(model: nn.Module, way: PlannedWay, folder: Path, layers: int, read: int = 0) -> PackedModel:
    """A contestant that reads so many of its layers. If it reads all, the stages of its tokens are timed."""
    where, staged = LayerMap(0, layers - read, read, spread=True), read == layers
    labels = {"method": way.method, "dtype": way.dtype, "layers": layers, "read": read}
    ours = stand_ins.contestant(model, way, folder, SAME, labels, staged=staged, placement=where)
    labels["unit_bytes"] = Store.open(ours.folder).layer(0, way.stored.format).nbytes
    return ours


def of_rivals(hidden: int, ffn: int, layers: int) -> pd.DataFrame:
    """The times of a size, as `rival_times` has them."""
    model, racing = _twin(hidden, ffn, layers), []
    with scratch_folder(make_folder(paths.cache_dir())) as folder, ExitStack() as stack:
        for name in LLAMA_CPP:
            rival = stack.enter_context(stand_ins.rival(name, model, folder, SAME, {"method": name, "layers": layers}))
            rival.labels["unit_bytes"] = rival.nbytes // layers
            racing.append(rival)
        spans = take_turns(racing, REPETITIONS, TOKENS, SKIPPED, stay_open=True)
    return _medians(spans, ["method", "layers"])


def of_mixture(hidden: int, ffn: int, layers: int, used: int) -> pd.DataFrame:
    """The times of a size with so many experts, all of which a token uses, as `mixture_times` has them."""
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


def of_neurons(hidden: int, ffn: int, layers: int) -> pd.DataFrame:
    """The times of a size, as `neuron_times` has them."""
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
