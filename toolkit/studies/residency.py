"""Which neurons stay in memory: residency policies raced from disk on a real model."""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from toolkit.cache import kept_folder
from toolkit.costs.replay import replay, units_of
from toolkit.errors import UserError
from toolkit.measure.contestant import Reference, Text
from toolkit.measure.packed_model import PackedModel
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import measured, take_turns
from toolkit.models.activation import activation_name
from toolkit.models.ffn import decoder_ffns
from toolkit.offload.by_neuron import ByNeuron
from toolkit.offload.model import OffloadedModel
from toolkit.policies.residencies import residency_of
from toolkit.policies.residency import Residency
from toolkit.predictors import Oracle
from toolkit.predictors.weightless import FromTrace
from toolkit.sparsity.trace import Trace, pack
from toolkit.storage.neuron_packing import LAYOUT, Neurons
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store
from toolkit.studies.loaded import LOADING, loaded, tokens_of, weights_key
from toolkit.studies.thresholded import TRACE, ThresholdedModel, few_samples, thresholds, trace

OPTIMUM = "belady"
POLICIES = ("window", "lru", "hot_table", "static")
FOLDER = "store"
SKIPPED = 8  # tokens of a turn that do not count
STAGES = {"io": "read", "manage": "manage", "compute": "compute"}  # columns, and stages of the timeline
NEAR = 0.25  # of the largest logit: neurons near the threshold fall on either side of it, and policies differ by 0.1


@dataclass(frozen=True)
class ResidencyRace:
    """One text through one model from disk, by each of `POLICIES`, under one limit of memory.

    `memory_share` is the limit of all weights and buffers over the bytes of the dense model. A turn takes `SKIPPED`
    tokens, which fill the memory, and then the `tokens` that count. `window` is the window's, in tokens. Raises
    `UserError` for more tokens than one window of the setting has.
    """

    setting: ThresholdedModel
    memory_share: float = 0.6
    window: int = 5
    tokens: int = 64
    repetitions: int = 3

    def __post_init__(self):
        """Refuse what cannot be raced."""
        if not 0 < self.tokens <= self.setting.sequence_length - SKIPPED:
            raise UserError(
                f"{SKIPPED} + {self.tokens} tokens: expected no more than {self.setting.sequence_length}, the "
                "setting's sequence_length"
            )

    @cached_property
    def active(self) -> list[Bool[np.ndarray, "tokens neurons"]]:
        """The neurons of each layer that the tokens use, recorded."""
        found = Trace.load(_trace(self.setting, SKIPPED + self.tokens) / TRACE, self.setting.model)
        return [found.active(layer)[0].numpy() for layer in range(found.layers)]

    @property
    def dram_bytes(self) -> int:
        """The limit in bytes."""
        return int(self.memory_share * sum(each.nbytes for each in loaded(self.setting.model)[0].parameters()))


def race_table(race: ResidencyRace, fresh: bool = False) -> pd.DataFrame:
    """A row for each policy, measured, and one for the optimum, replayed.

    Columns: policy; tokens_per_s (median over the turns), tokens_per_s_low, tokens_per_s_high; missed (share of the
    neurons that tokens need and memory lacked); neurons_read, mb_a_token and io_ms, manage_ms, compute_ms of a token;
    replayed (neurons that a replay of the recorded tokens reads: the measured number must be the same); evidence.
    Raises `UserError` for a limit that is too small, or logits that differ.
    """
    runs = _runs(race, fresh=fresh)
    table = summary(runs, ["policy"], ["tokens_per_s"]).set_index("policy")
    needed = sum(int(layer[SKIPPED:].sum()) for layer in race.active) / race.tokens
    rows, frequencies = held_rows(race), frequencies_of(race.setting)
    replayed = pd.Series(0.0, [*POLICIES, OPTIMUM])
    for policy in replayed.index:
        for layer, held, frequency in zip(race.active, rows, frequencies, strict=True):
            tokens = units_of(layer)
            residency = residency_of(policy, layer.shape[1], held, tokens, frequency, race.window)
            replayed[policy] += replay(tokens, residency)["loaded"][SKIPPED:].mean()
    table = table.reindex(replayed.index).assign(replayed=replayed)
    optimum = table.index == OPTIMUM
    table.loc[optimum, "neurons_read"] = table.loc[optimum, "replayed"]
    table = table.assign(
        missed=table["neurons_read"] / needed, memory=sum(rows) / sum(layer.shape[1] for layer in race.active)
    )
    return table.assign(evidence=np.where(optimum, "modelled", "measured")).reset_index(names="policy")


@measured
def _runs(race: ResidencyRace) -> pd.DataFrame:
    """A row for each policy and repetition."""
    text = _text(race)
    racing = [_contestant(race, policy, text) for policy in POLICIES]
    spans = take_turns(racing, race.repetitions, race.tokens, SKIPPED)
    store = Store.open(_folder(race.setting) / FOLDER)
    (bundle,) = store.layer(0, LAYOUT).ops.values()
    neuron_bytes = store.layer(0, LAYOUT).nbytes // bundle.shape[0]
    turns = by_turn(spans, ["policy"])
    stages = {f"{name}_ms": 1e3 * turns[f"{stage}_s"] for name, stage in STAGES.items()}
    numbers = {"mb_a_token": turns["read_bytes"] / 1e6, "neurons_read": turns["read_bytes"] / neuron_bytes}
    return turns[["policy", "repetition", "tokens_per_s", "disturbed"]].assign(**numbers, **stages)


def frequencies_of(setting: ThresholdedModel) -> list[Float64[np.ndarray, " neurons"]]:
    """How often calibration text uses each neuron of each layer."""
    found = few_samples(setting, "training")
    return [found.active(layer).double().mean(0).numpy() for layer in range(found.layers)]


def held_rows(race: ResidencyRace) -> list[int]:
    """The neurons that the limit lets each layer hold."""
    limited = {"dram_bytes": race.dram_bytes, "verify": False}
    with OffloadedModel.open(_folder(race.setting) / FOLDER, predictors=_predictors(race), **limited) as model:
        assert isinstance(model.strategy, ByNeuron)  # the folder holds neurons
        return [ffn.store.residency.rows for ffn in model.strategy.ffns]


def _contestant(race: ResidencyRace, policy: str, text: Text) -> PackedModel:
    frequencies = frequencies_of(race.setting)

    def residency(layer: int, neurons: int, rows: int) -> Residency:
        return residency_of(policy, neurons, rows, frequency=frequencies[layer], window=race.window)

    settings = {"dram_bytes": race.dram_bytes, "residency": residency, "predictors": _predictors(race)}
    return PackedModel(policy, _folder(race.setting) / FOLDER, text, {"policy": policy}, **settings)


def _predictors(race: ResidencyRace) -> list[FromTrace]:
    hidden = loaded(race.setting.model)[0].config.hidden_size
    return [FromTrace(layer, hidden) for layer in race.active]


def _text(race: ResidencyRace) -> Text:
    """The recorded tokens, one a pass. Logits must be those of the policy that comes first.

    The logits of the model in memory differ: rounded to bfloat16, some outputs lie on the other side of the threshold.
    """
    tokens = tokens_of(race.setting.model, race.setting.corpus, "evaluation")[None, : SKIPPED + race.tokens]
    return Text(tokens.split(1, 1), Reference(POLICIES[0], near=NEAR))


@kept_folder("neurons", without=LOADING, key=weights_key)
def _folder(folder: Path, setting: ThresholdedModel) -> None:
    """The model by neuron; each layer's share of the memory follows what a token needs at most."""
    (model, tokenizer, _), found = loaded(setting.model), trace(setting, 1)
    needs = [int(found.active(layer).sum(-1).max()) for layer in range(found.layers)]
    pack_model(model, folder / FOLDER, Neurons(thresholds(setting).tolist(), needs=needs), setting.model, tokenizer)


@kept_folder("traces", without=LOADING, key=weights_key)
def _trace(folder: Path, setting: ThresholdedModel, tokens: int) -> None:
    """The neurons that the first tokens use when the engine computes them with all neurons in memory."""
    model, limits = loaded(setting.model)[0], thresholds(setting)
    exact = [
        RecordingOracle.of(ffn, activation_name(model), float(limit))
        for ffn, limit in zip(decoder_ffns(copy.deepcopy(model).float()), limits, strict=True)
    ]
    ids = tokens_of(setting.model, setting.corpus, "evaluation")[None, :tokens]
    with OffloadedModel.open(_folder(setting) / FOLDER, predictors=exact, verify=False) as engine, torch.no_grad():
        past = None
        for one in ids.split(1, 1):
            past = engine.model(one, past_key_values=past, use_cache=True).past_key_values
    bits = tuple(pack(torch.stack(each.masks)[None]) for each in exact)
    units = tuple(each.shape[0] for each in exact)
    Trace(setting.model, setting.corpus, ids.int(), units, bits, thresholds=limits.float()).save(folder / TRACE)


class RecordingOracle(Oracle):
    """The exact predictor, as if it took no memory; it remembers what it predicted, `masks`."""

    nbytes = 0

    @cached_property
    def masks(self) -> list[Bool[Tensor, " neurons"]]:
        """The mask of each token."""
        return []

    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens neurons"]:
        """The oracle's prediction."""
        found = super().mask(x)
        self.masks.extend(found)
        return found
