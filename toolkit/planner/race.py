"""Predictions of the planner for a model on this machine, beside what is then measured.

    raced(Trial("smollm2-135m", dram_shares=(0.6,)))

Only time is measured, with stand-ins (`toolkit.planner.stand_ins`).
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from toolkit import paths
from toolkit.errors import UserError, unknown
from toolkit.files import make_folder, scratch_folder
from toolkit.measure.summary import by_turn, summary
from toolkit.measure.turns import measured, take_turns
from toolkit.models import load_model
from toolkit.models.architectures import ModelShape
from toolkit.models.shape_of import shape_of
from toolkit.models.twins import twin_model
from toolkit.planner import sizes, stand_ins
from toolkit.planner.speed import speed, this_machine
from toolkit.planner.target import open_target
from toolkit.planner.ways import NEURONS, RIVAL, ZEROS, PlannedWay, ways
from toolkit.text import load_tokens

SKIPPED, TOKENS_TO_FILL = 6, 24  # tokens before those that count; experts need more of them to fill the memory
CORPUS, VOCABULARY = "wiki-slice", 1000  # of real models, and of twins, whose layers are what counts


@dataclass(frozen=True)
class Trial:
    """A model, or a twin of so many layers of a shape; the ways that race, by name (all of ours if there is none).

    Of the named ways, those race that the model has: a twin none by neuron, a sparse model nothing else.
    `dram_shares` of the bytes of the dense weights are the limits of memory, one after the other; 1 holds all ways
    whole, with their buffers. llama.cpp races where its file fits, in memory.
    """

    model: str
    layers: int | None = None
    dram_shares: tuple[float, ...] = (1.0,)
    names: tuple[str, ...] = ()
    tokens: int = 8
    repetitions: int = 3

    @property
    def label(self) -> str:
        """The model, with its layers where it is a twin."""
        return self.model if self.layers is None else f"{self.model}, {self.layers} layers"


@measured
def raced(trial: Trial) -> pd.DataFrame:
    """A row for each limit and way that fits: what was predicted, and what was measured after it; kept.

    Columns: model, way, kind, dram_mb (the limit), predicted_per_s and tokens_per_s (tokens a second: predicted, and
    the median of the turns), tokens_per_s_low, tokens_per_s_high, off_by (|measured / predicted − 1|), read_mb and
    predicted_mb (from the disk, a token), held_share (of layers or experts, in memory), mode, disturbed, evidence.
    Raises `UserError` for an unknown model or way, or if no way fits.
    """
    model, tables = _model(trial), []
    shape = shape_of(model)
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        for limit in (_limit(shape, trial, share) for share in trial.dram_shares):
            if fitting := [way for way in _ways(shape, trial) if _least_bytes(shape, way) <= limit]:
                predicted = _predicted(shape, fitting, limit)
                table = predicted.merge(_measured(trial, model, fitting, limit, folder), on="way")
                tables.append(table.assign(dram_mb=limit / 1e6))
    if not tables:
        raise UserError(f"{trial.label}: no way fits into {trial.dram_shares} of its bytes; give larger shares")
    table = pd.concat(tables, ignore_index=True)
    off_by = (table["tokens_per_s"] / table["predicted_per_s"] - 1).abs()
    return table.assign(model=trial.label, off_by=off_by, evidence="measured")


def _predicted(shape: ModelShape, racing: list[PlannedWay], limit: int) -> pd.DataFrame:
    machine, rows = this_machine(limit, experts=bool(shape.experts)), []
    for way in racing:
        found = speed(shape, way, machine, prompt_tokens=1)
        numbers = {"predicted_per_s": found.tokens_s, "predicted_mb": found.read_bytes / 1e6, "held_share": found.held}
        rows.append({"way": way.name, "kind": way.kind} | numbers)
    return pd.DataFrame(rows)


def _measured(trial: Trial, model: nn.Module, racing: list[PlannedWay], limit: int, folder: Path) -> pd.DataFrame:
    """The `summary` of the turns. Our ways take turns; each rival, whole in memory, runs by itself."""
    skipped = TOKENS_TO_FILL if shape_of(model).experts else SKIPPED
    text, count = _text(trial, skipped + trial.tokens), (trial.repetitions, trial.tokens, skipped)
    calibration = None if trial.layers is not None else _tokens(trial, "calibration", stand_ins.CALIBRATED)
    ours, spans = [], []
    for way in (way for way in racing if way.kind != RIVAL):
        settings = {"calibration": calibration, "dram_bytes": limit}
        ours.append(stand_ins.contestant(model, way, folder, text, {"way": way.name}, **settings))
    spans += [take_turns(ours, *count)] if ours else []
    for name in (way.name for way in racing if way.kind == RIVAL):
        with stand_ins.rival(name, model, folder, text, {"way": name}) as rival:
            spans.append(take_turns([rival], *count, stay_open=True))
    table = summary(by_turn(pd.concat(spans), ["way"]), ["way"], ["tokens_per_s"])
    rates = ["tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"]
    return table.assign(read_mb=table["read_bytes"] / 1e6)[["way", *rates, "read_mb", "disturbed", "mode"]]


def _ways(shape: ModelShape, trial: Trial) -> list[PlannedWay]:
    """The ways that race, of those that the model has."""
    target = open_target(trial.model)
    cut = target.cut if trial.layers is None else ()  # which neurons fire depends on weights, and a twin's are random
    every = {way.name for experts in (False, True) for way in ways(experts, (*ZEROS, *target.cut))}
    for name in trial.names:
        if name not in every:
            raise unknown("way", name, every)
    chosen = [way for way in ways(bool(shape.experts), cut) if way.name in trial.names or not trial.names]
    if target.own_thresholds:  # its other ways run as those of the dense model
        return [way for way in chosen if way.kind == NEURONS]
    rivals = bool(trial.names) and not shape.experts  # a mixture's files for llama.cpp take long to write
    return [way for way in chosen if way.runs_here or (way.kind == RIVAL and rivals)]


def _limit(shape: ModelShape, trial: Trial, share: float) -> int:
    if share == 1:
        return max(sizes.footprint(shape, way).all_bytes for way in _ways(shape, trial))
    return round(share * shape.nbytes(sizes.ELEMENT_BYTES))


def _least_bytes(shape: ModelShape, way: PlannedWay) -> int:
    memory = sizes.footprint(shape, way)
    return memory.all_bytes if way.kind == RIVAL else memory.needed_bytes


def _tokens(trial: Trial, split: str, count: int) -> Tensor:
    """The first token ids of a split of the corpus."""
    return load_tokens(CORPUS, load_model(trial.model, torch.bfloat16)[1], split).flatten()[:count]


def _text(trial: Trial, passes: int) -> list[Tensor]:
    """The tokens of a turn, one by one: evaluation text, since experts depend on it; of a twin, one again and again."""
    if trial.layers is not None:
        return [torch.tensor([[stand_ins.TOKEN]])] * passes
    return list(_tokens(trial, "evaluation", passes).view(-1, 1, 1))


def _model(trial: Trial) -> nn.Module:
    """The model in bfloat16, or a twin of random weights."""
    if trial.layers is None:
        return load_model(trial.model, torch.bfloat16)[0]
    return twin_model(trial.model, trial.layers, torch.bfloat16, sparsity=0.0, vocabulary=VOCABULARY)
