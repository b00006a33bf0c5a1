"""The planner's predictions for a model on this machine, beside what is then measured.

    raced(Trial("smollm2-135m", dram_shares=(0.6,)))

Only time is measured, with stand-ins (`toolkit.planner.stand_ins`).
"""

from dataclasses import dataclass
from functools import cache

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
from toolkit.planner.hits import hits_of
from toolkit.planner.speed import speed, this_machine
from toolkit.planner.target import open_target
from toolkit.planner.ways import NEURONS, RIVAL, ZEROS, PlannedWay, ways
from toolkit.text import load_tokens

SKIPPED, TOKENS_TO_FILL = 6, 24  # tokens before those that count; experts need more of them to fill the memory
CORPUS, VOCABULARY = "wiki-slice", 1000  # of real models, and of twins, whose layers are what counts


@dataclass(frozen=True)
class Trial:
    """A model, or a twin of so many layers of a shape; the ways that race, by name (all of ours if there is none).

    A named way races if the model has it: a twin none by neuron, a sparse model nothing else.
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


def raced(trial: Trial) -> pd.DataFrame:
    """A row for each limit and way that fits: what was predicted, and what was measured after it.

    Columns: model, way, kind, dram_mb (the limit), predicted_per_s and tokens_per_s (tokens a second: predicted, and
    the median of the turns), tokens_per_s_low, tokens_per_s_high, off_by (|measured / predicted − 1|), read_mb and
    predicted_mb (from the disk, a token), held_share (of layers or experts, in memory), mode, disturbed, evidence.
    Raises `UserError` for an unknown model or way, or if no way fits.
    """
    shape = shape_of(_model(trial))
    chosen = {way.name: way for way in _ways(shape, trial)}
    planned = {}
    for limit in (_limit(shape, trial, share) for share in trial.dram_shares):
        machine = this_machine(limit, experts=bool(shape.experts))
        for name, way in chosen.items():
            memory = sizes.footprint(shape, way)
            if (memory.all_bytes if way.kind == RIVAL else memory.needed_bytes) <= limit:
                planned[limit, name] = speed(shape, way, machine, 1, hits_of(shape, way, limit))
    if not planned:
        raise UserError(f"{trial.label}: no way fits into {trial.dram_shares} of its bytes; give larger shares")
    rows = []
    for row in _measured(trial, tuple(planned)).to_dict("records"):
        limit = row.pop("dram_bytes")
        of, way = planned[limit, row["way"]], chosen[row["way"]]
        about = {"model": trial.label, "kind": way.kind, "dram_mb": limit / 1e6, "held_share": of.held}
        off_by = abs(row["tokens_per_s"] / of.tokens_s - 1)
        judged = {"predicted_per_s": of.tokens_s, "off_by": off_by, "predicted_mb": of.read_bytes / 1e6}
        rows.append(about | row | judged)
    return pd.DataFrame(rows).assign(evidence="measured")


def winners(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each model and limit of a table of `raced`: the way that is predicted to be the fastest, and that is.

    Columns: model, dram_mb, named, fastest, tie (whether the turns of the two overlap), reached (speed of the named way
    over the fastest's). Cases of one way are left out.
    """
    rows = []
    for (model, dram_mb), case in table.groupby(["model", "dram_mb"], sort=False):
        named, fastest = (case.loc[case[name].idxmax()] for name in ("predicted_per_s", "tokens_per_s"))
        row = {"model": model, "dram_mb": dram_mb, "named": named["way"], "fastest": fastest["way"]}
        row |= {"tie": named["tokens_per_s_high"] >= fastest["tokens_per_s_low"]}
        row |= {"reached": named["tokens_per_s"] / fastest["tokens_per_s"]}
        rows += [row] if len(case) > 1 else []
    return pd.DataFrame(rows)


@measured
def _measured(trial: Trial, cases: tuple[tuple[int, str], ...]) -> pd.DataFrame:
    """A row for each limit in bytes and way; ways under one limit take turns.

    Columns: dram_bytes, way, tokens_per_s, tokens_per_s_low, tokens_per_s_high, read_mb, disturbed, mode.
    """
    model, rows = _model(trial), []
    shape = shape_of(model)
    skipped = TOKENS_TO_FILL if shape.experts else SKIPPED
    text, chosen = _text(trial, skipped + trial.tokens), {way.name: way for way in _ways(shape, trial)}
    count = (trial.repetitions, trial.tokens, skipped)
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        ours = [case for case in cases if chosen[case[1]].kind != RIVAL]
        calibration = None if trial.layers is not None else _tokens(trial, "calibration", stand_ins.CALIBRATED)
        places = {name: stand_ins.packed(model, chosen[name], folder, calibration) for _, name in ours}
        for limit in dict.fromkeys(limit for limit, _ in cases):
            settings = {"dram_bytes": limit, "verify": False}
            racing = [
                stand_ins.contestant(places[name], chosen[name], text, {"way": name, "dram_bytes": limit}, **settings)
                for of_limit, name in ours
                if of_limit == limit
            ]
            rows.append(_turns(take_turns(racing, *count)))
        for limit, name in (case for case in cases if case not in ours):
            with stand_ins.rival(name, model, folder, text, {"way": name, "dram_bytes": limit}) as rival:
                rows.append(_turns(take_turns([rival], *count, stay_open=True)))
    return pd.concat(rows, ignore_index=True)


def _turns(spans: pd.DataFrame) -> pd.DataFrame:
    """The medians over the turns of each way."""
    keys, rate = ["dram_bytes", "way"], "tokens_per_s"
    table = summary(by_turn(spans, keys), keys, [rate])
    table["read_mb"] = table["read_bytes"] / 1e6
    return table[[*keys, rate, f"{rate}_low", f"{rate}_high", "read_mb", "disturbed", "mode"]]


def _ways(shape: ModelShape, trial: Trial) -> list[PlannedWay]:
    """The ways that race, of those that the model has."""
    target = open_target(trial.model)
    cut = target.cut if trial.layers is None else ()  # which neurons fire depends on weights, and a twin's are random
    known = {way.name: way for way in ways(bool(shape.experts), cut)}
    every = {way.name for experts in (False, True) for way in ways(experts, (*ZEROS, *target.cut))}
    for name in trial.names:
        if name not in every:
            raise unknown("way", name, every)
    chosen = [way for way in known.values() if way.name in trial.names or not trial.names]
    if target.own_thresholds:  # its other ways run as those of the dense model
        return [way for way in chosen if way.kind == NEURONS]
    rivals = bool(trial.names) and not shape.experts  # a mixture's files for llama.cpp take long to write
    return [way for way in chosen if way.runs_here or (way.kind == RIVAL and rivals)]


def _tokens(trial: Trial, split: str, count: int) -> Tensor:
    """The first token ids of a split of the corpus."""
    return load_tokens(CORPUS, load_model(trial.model, torch.bfloat16)[1], split).flatten()[:count]


def _limit(shape: ModelShape, trial: Trial, share: float) -> int:
    if share == 1:
        return max(sizes.footprint(shape, way).all_bytes for way in _ways(shape, trial))
    return round(share * shape.nbytes(sizes.ELEMENT_BYTES))


def _text(trial: Trial, passes: int) -> list[Tensor]:
    """The tokens of a turn, one by one: evaluation text, since experts depend on it; of a twin, one again and again."""
    if trial.layers is not None:
        return [torch.tensor([[stand_ins.TOKEN]])] * passes
    return list(_tokens(trial, "evaluation", passes).view(-1, 1, 1))


@cache
def _model(trial: Trial) -> nn.Module:
    """The model in bfloat16, or a twin of random weights."""
    if trial.layers is None:
        return load_model(trial.model, torch.bfloat16)[0]
    return twin_model(trial.model, trial.layers, torch.bfloat16, sparsity=0.0, vocabulary=VOCABULARY)
