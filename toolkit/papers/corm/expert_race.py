"""Ways of loading experts raced from disk under one limit of DRAM: on demand, predicted a layer ahead, cached, both.

Every way gives the same logits, to the bit: experts that are missing when they are needed are read then. Experts are
read whole.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from toolkit import paths
from toolkit.cache import kept_folder
from toolkit.errors import UserError
from toolkit.files import make_folder, scratch_folder
from toolkit.measure import llama_cpp
from toolkit.measure.contestant import Reference, Text
from toolkit.measure.llama_cpp import LlamaCpp
from toolkit.measure.packed_model import PackedModel
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import measured, take_turns
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.cached_pass import CACHE, cached_pass
from toolkit.models.experts import Experts, Routed
from toolkit.models.twins import twin_mixture
from toolkit.offload.by_expert import ByExpert
from toolkit.offload.expert_ffn import ExpertFFN, RecordedRouter, Router
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import WINDOW, Demand
from toolkit.papers.corm.cost_model import ON_DEMAND
from toolkit.residency.replay import COUNTS, replay_experts
from toolkit.residency.two_level import TwoLevel
from toolkit.sparsity.changed import LOADING
from toolkit.storage.buffers import buffer_bytes
from toolkit.storage.experts import RandomExperts, WholeExperts
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store
from toolkit.studies.loaded import loaded, tokens_of

EXACT = replace(ON_DEMAND, exact=True)
RACED = {  # what each does beside reading experts when they are needed
    "on demand": EXACT,
    "look-ahead": replace(EXACT, prefetch=True),
    "cached": replace(EXACT, cached=True),
    "both": replace(EXACT, prefetch=True, cached=True),
}
FOLDER = "packed"
CORPUS = "wiki-slice"
LAYERS, ROUTED_LIKE = 4, "smollm2-135m-moe-upcycled"
TOKEN = 7  # of a twin, for which every token is as good


@dataclass(frozen=True)
class ExpertRace:
    """A mixture on disk, and how much of it memory holds.

    A model gets evaluation text of `CORPUS`, token by token. A twin has `LAYERS` layers, and replays the routing of the
    first layers of `ROUTED_LIKE`.

    Args:
        model: as `load_model` takes it, or a mixture of `ARCHITECTURES`, of which a twin with random experts is made.
        bits: of an expert's weight; None: as the model has them.
        share: of the experts, that the limit of DRAM holds.
        tokens: that count in a turn, after `skipped` ones that fill the memory.
        rivals: types of llama.cpp's file, mapped, in a memory cgroup of as many bytes.
    """

    model: str = "smollm2-135m-moe-upcycled"
    bits: int | None = None
    share: float = 0.5
    tokens: int = 12
    skipped: int = 6
    repetitions: int = 3
    rivals: tuple[str, ...] = ()

    @property
    def is_twin(self) -> bool:
        """Whether the experts are random."""
        return self.model in ARCHITECTURES


def race_table(race: ExpertRace, fresh: bool = False) -> pd.DataFrame:
    """A row for each way, measured.

    Columns: way; tokens_per_s (median over the turns), tokens_per_s_low, tokens_per_s_high; over_demand (tokens a
    second over those of experts on demand in the same turn, median), over_demand_low, over_demand_high; read_mb,
    prefetched_mb and wasted_mb a token; expert_hits and neuron_hits (share of what is needed that was there: the same,
    since experts are whole); predicted (share of an expert's neurons that look-ahead asks for: all); replayed_hits
    (hits by replay, without a disk); limit_mb (of DRAM); mode; disturbed; evidence. Counts and bytes but those read are
    of all tokens of a turn.

    Raises `UserError` for an unknown model, a share that does not hold one token's experts, or logits that differ.
    """
    on_demand = {"over_demand": {"way": next(iter(RACED))}}
    table = summary(_runs(race, fresh=fresh), ["way"], ["tokens_per_s"], on_demand).drop(columns="seconds")
    return table.set_index("way").join(_counted(race)).assign(evidence="measured").reset_index()


def logits(race: ExpertRace, exact: bool) -> tuple[Float32[Tensor, "tokens vocabulary"], Int64[Tensor, " tokens"]]:
    """The logits of each token of a turn, one by one from disk with look-ahead and cache, and the tokens.

    Without `exact` mispredicted experts are not read.
    """
    with OffloadedModel.open(_folder(race), **_settings(race, "both", exact)) as engine, torch.no_grad():
        return _pass_all(engine, race), torch.cat(_tokens(race)).flatten()


def counts(race: ExpertRace, way: str) -> dict[str, int]:
    """The counts of the engine's caches over the tokens of a turn, all layers together, as `CacheCounts` has them."""
    caches = _engine(race, way)
    return {name: sum(getattr(each.of_experts, name) for each in caches) for name in COUNTS}


@cache
def _engine(race: ExpertRace, way: str) -> list[TwoLevel]:
    """The caches of an engine, emptied after the tokens of a turn."""
    with OffloadedModel.open(_folder(race), **_settings(race, way)) as engine, torch.no_grad():
        _pass_all(engine, race)
        caches = [ffn.slots.cache for ffn in _mixtures_of(engine)]
        for each in caches:
            each.clear()  # so that what was prefetched and never needed counts as wasted
    return caches


def _pass_all(engine: OffloadedModel, race: ExpertRace) -> Float32[Tensor, "tokens vocabulary"]:
    """The logits of each token of a turn."""
    past, logits = None, []
    for one in _tokens(race):
        output = cached_pass(engine.model, one, past)
        past = getattr(output, CACHE)
        logits.append(output.logits[0, -1].float())
    return torch.stack(logits)


def replayed(race: ExpertRace, way: str) -> dict[str, int]:
    """The counts of `counts`, by replay of the routing that the engine has recorded, without a disk."""
    sizes = [(each.experts, each.slots) for each in _engine(race, way)]
    tables = []
    for (experts, slots), chosen, predicted in zip(sizes, *routing_of(race), strict=True):
        needed = [dict.fromkeys(ids) for ids in chosen]
        ahead = [dict.fromkeys(ids) or None for ids in predicted] if RACED[way].prefetch else [None] * len(needed)
        spans = [slice(None)] if RACED[way].cached else [slice(at, at + 1) for at in range(len(needed))]
        tables += [replay_experts(needed[span], TwoLevel(experts, 1, slots), ahead[span]) for span in spans]
    return {name: int(pd.concat(tables)[name].sum()) for name in COUNTS}


Ids = list[list[list[int]]]  # of each layer and token


@cache
def routing_of(race: ExpertRace) -> tuple[Ids, Ids]:
    """The experts that each token of a turn used, and those that were predicted for it: none in the first layer."""
    heard: list[_Listening] = []

    def listening(layer: int, experts: Experts) -> Router:
        heard.append(_Listening(experts, inner(layer, experts) if inner else Router(experts)))
        return heard[-1]

    settings = _settings(race, "look-ahead")
    inner = settings["demand"].routing
    settings["demand"] = replace(settings["demand"], routing=listening)
    with OffloadedModel.open(_folder(race), **settings) as engine, torch.no_grad():
        _pass_all(engine, race)
    return [each.chosen for each in heard], [each.predicted or [[]] * len(each.chosen) for each in heard]


class _Listening(Router):
    """A router that records the choices and predictions of another one."""

    def __init__(self, experts: Experts, inner: Router):
        super().__init__(experts)
        self.inner, self.chosen, self.predicted = inner, [], []

    def choose(self, x: Tensor, ids: Tensor, weights: Tensor) -> Routed:
        """The other one's choice."""
        routed = self.inner.choose(x, ids, weights)
        self.chosen += routed[0].tolist()
        return routed

    def predict(self, x: Tensor) -> Int64[Tensor, "1 k"]:
        """The other one's prediction."""
        ids = self.inner.predict(x)
        self.predicted += ids.tolist()
        return ids

    def weigh(self, x: Tensor, ids: Int64[Tensor, "1 k"]) -> Tensor:
        """The other one's weights."""
        return self.inner.weigh(x, ids)


@measured
def _runs(race: ExpertRace) -> pd.DataFrame:
    """A row for each way and repetition."""
    text = Text(_tokens(race), Reference(next(iter(RACED))))
    settings = {way: _settings(race, way) for way in RACED}
    racing: list = [PackedModel(way, _folder(race), text, {"way": way}, **settings[way]) for way in RACED]
    with ExitStack() as stack:
        for name in race.rivals:
            if not llama_cpp.missing(limited=True):
                racing.append(stack.enter_context(_rival(race, name)))
        spans = take_turns(racing, race.repetitions, race.tokens, race.skipped)
    turns = by_turn(spans, ["way"])
    sizes = {"read_mb": turns["read_bytes"] / 1e6, "limit_mb": turns["memory_bytes"] / 1e6}
    return turns[["way", "repetition", "seconds", "tokens_per_s", "mode", "disturbed"]].assign(**sizes)


@contextmanager
def _rival(race: ExpertRace, name: str) -> Iterator[LlamaCpp]:
    text = Text(_tokens(race), cached=False)
    limit = _settings(race, "cached")["dram_bytes"]
    with (
        scratch_folder(make_folder(paths.cache_dir())) as folder,
        closing(LlamaCpp(name, loaded(race.model)[0], folder, text, {"way": name}, memory_bytes=limit)) as rival,
    ):
        yield rival


def _counted(race: ExpertRace) -> pd.DataFrame:
    """For each way of ours: hits by the engine and by replay, and megabytes a token that look-ahead read, or wasted."""
    store = Store.open(_folder(race))
    expert_mb = max(run.nbytes for run in store.index.ops) / 1e6
    rows = {}
    for way in RACED:
        engine, replay = counts(race, way), replayed(race, way)
        each = {name: expert_mb * engine[name] / len(_tokens(race)) for name in ("prefetched", "wasted")}
        hits = {"expert_hits": engine, "replayed_hits": replay}
        rows[way] = {name: 1 - found["late"] / found["needed"] for name, found in hits.items()}
        rows[way] |= {"neuron_hits": rows[way]["expert_hits"], "predicted": float(RACED[way].prefetch)}
        rows[way] |= {f"{name}_mb": value for name, value in each.items()}
    return pd.DataFrame(rows).T


def _settings(race: ExpertRace, way: str, exact: bool = True) -> dict:
    """The settings of `OffloadedModel.open`."""
    chosen = RACED[way]
    routing = partial(_recorded, race) if race.is_twin else None
    demand = Demand(window=WINDOW if chosen.cached else 0, look_ahead=chosen.prefetch, exact=exact, routing=routing)
    return {"dram_bytes": _limit(race), "verify": False, "demand": demand}


@cache
def _limit(race: ExpertRace) -> int:
    """The bytes of DRAM that hold the share of the experts, and all that is no expert."""
    with OffloadedModel.open(_folder(race), verify=False) as engine:
        taken = dict(engine.budgets["dram"].taken)
        count = sum(ffn.slots.cache.experts for ffn in _mixtures_of(engine))
        slot = max(run.nbytes for run in engine.store.index.ops)
    del taken["slots"]
    return sum(taken.values()) + buffer_bytes(round(race.share * count) * slot)


def _recorded(race: ExpertRace, layer: int, experts: Experts) -> RecordedRouter:
    """The routing of a layer of another model, for a twin."""
    like = replace(race, model=ROUTED_LIKE, rivals=())
    chosen, predicted = (of[layer] for of in routing_of(like))
    ids = torch.tensor(chosen)
    if ids.max() >= experts.count or ids.shape[1] != experts.per_token:
        raise UserError(
            f"{ROUTED_LIKE} sends a token to {ids.shape[1]} experts, up to number {ids.max()}; {race.model} to "
            f"{experts.per_token} of {experts.count}: a twin is routed like that model"
        )
    return RecordedRouter(experts, ids, torch.tensor(predicted) if predicted[0] else ids)


@cache
def _tokens(race: ExpertRace) -> list[Tensor]:
    count = race.skipped + race.tokens
    if race.is_twin:
        return [torch.tensor([[TOKEN]])] * count
    return list(tokens_of(race.model, CORPUS, "evaluation")[:count].view(-1, 1, 1))


def _mixtures_of(engine: OffloadedModel) -> list[ExpertFFN]:
    assert isinstance(engine.strategy, ByExpert)  # the folder holds experts
    return engine.strategy.ffns


@cache
def _folder(race: ExpertRace) -> Path:
    """The packed mixture, kept."""
    return _packed(race.model, race.bits) / FOLDER


def _weights(model: str) -> dict[str, str]:
    """The key of a mixture beside its name; a twin has none."""
    return {} if model in ARCHITECTURES else {"weights_sha256": loaded(model)[2]}


@kept_folder("experts", without=LOADING, key=_weights)
def _packed(folder: Path, model: str, bits: int | None) -> None:
    if model in ARCHITECTURES:
        pack_model(twin_mixture(model, LAYERS), folder / FOLDER, RandomExperts(bits or 4), model)
    else:
        weights, tokenizer, _ = loaded(model)
        pack_model(weights, folder / FOLDER, WholeExperts(bits), model, tokenizer)
