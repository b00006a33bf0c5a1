"""What the planner predicts of a model on this machine, beside what is then measured.

    raced(Trial("smollm2-135m", dram_share=0.6))

Only time is measured, with stand-ins (`toolkit.planner.stand_ins`). `toolkit.planner.history` keeps each measurement.
"""

from dataclasses import dataclass
from functools import cache

import pandas as pd
import torch
from torch import Tensor, nn

from toolkit import paths
from toolkit.errors import UserError, unknown
from toolkit.files import make_folder, scratch_folder
from toolkit.measure.turns import measured, take_turns, timeline_of
from toolkit.models import load_model
from toolkit.models.architectures import ModelShape
from toolkit.models.shape_of import shape_of
from toolkit.models.twins import twin_model
from toolkit.planner import history, sizes, stand_ins
from toolkit.planner.hits import hits_of
from toolkit.planner.speed import speed, this_machine
from toolkit.planner.ways import RIVAL, PlannedWay, ways
from toolkit.text import load_tokens

SKIPPED = 2
CORPUS, VOCABULARY = "wiki-slice", 32_000  # of twins


@dataclass(frozen=True)
class Trial:
    """A model, or a twin of so many layers of a shape; the ways that race, by name (all of ours if there is none).

    `dram_share` of the bytes of the dense weights is the memory for all of them; None holds the largest of them whole.
    """

    model: str
    layers: int | None = None
    dram_share: float | None = None
    names: tuple[str, ...] = ()
    tokens: int = 8
    repetitions: int = 3

    @property
    def label(self) -> str:
        """The model, with its layers where it is a twin."""
        return self.model if self.layers is None else f"{self.model}, {self.layers} layers"


def raced(trial: Trial) -> pd.DataFrame:
    """A row for each way that fits: what was predicted, and what was measured after it.

    Columns: model, way, kind, dram_mb (the limit), predicted_per_s and tokens_per_s (tokens a second: predicted, and
    the median of the turns), low, high, off_by (|measured / predicted − 1|), read_mb and predicted_mb (from the disk, a
    token), held_share (of layers or experts, in memory), mode, disturbed, evidence. Raises `UserError` for an unknown
    model or way, or if no way fits.
    """
    shape = shape_of(_model(trial))
    dram_bytes = _limit(shape, trial)
    machine = this_machine(dram_bytes)
    chosen = {way.name: way for way in _ways(shape, trial)}
    planned = {}
    for name, way in chosen.items():
        if sizes.footprint(shape, way).needed_bytes <= machine.dram_bytes:
            planned[name] = speed(shape, way, machine, 1, hits_of(shape, way, machine.dram_bytes))
    if not planned:
        raise UserError(f"{trial.label}: no way fits into {machine.dram_bytes / 1e6:.0f} MB; give a larger dram_share")
    found = _measured(trial, tuple(planned), machine.dram_bytes)
    rows = []
    for row in found.to_dict("records"):
        of, way = planned[row["way"]], chosen[row["way"]]
        ratio = row["tokens_per_s"] / of.tokens_s
        history.record(trial.label, way, dram_bytes, of.tokens_s, row["tokens_per_s"], row["disturbed"])
        about = {"model": trial.label, "kind": way.kind, "dram_mb": machine.dram_bytes / 1e6, "held_share": of.held}
        judged = {"predicted_per_s": of.tokens_s, "off_by": abs(ratio - 1), "predicted_mb": of.read_bytes / 1e6}
        rows.append(about | row | judged)
    return pd.DataFrame(rows).assign(evidence="measured")


@measured
def _measured(trial: Trial, names: tuple[str, ...], dram_bytes: int) -> pd.DataFrame:
    """Columns: way, tokens_per_s, low, high, read_mb, disturbed, mode. Ways take turns."""
    model, text = _model(trial), _text(trial)
    chosen = {way.name: way for way in ways(bool(shape_of(model).experts))}
    settings = {"dram_bytes": dram_bytes, "verify": False}
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        racing = []
        for number, name in enumerate(names):
            stand_ins.pack(model, chosen[name], folder / str(number))
            racing.append(stand_ins.contestant(folder / str(number), chosen[name], text, {"way": name}, **settings))
        del model
        spans = take_turns(racing, trial.repetitions, trial.tokens, SKIPPED)
    rows = []
    for (name, _), turn in spans.groupby(["way", "repetition"], sort=False):
        read = turn.loc[turn["stage"] == "read", "nbytes"].sum() / trial.tokens / 1e6
        rate = trial.tokens / timeline_of(turn).total_s
        first = turn.iloc[0]
        rows.append(
            {"way": name, "tokens_per_s": rate, "read_mb": read, "disturbed": first["disturbed"], "mode": first["mode"]}
        )
    turns = pd.DataFrame(rows).groupby("way", sort=False)
    rates = turns["tokens_per_s"].agg(tokens_per_s="median", low="min", high="max")
    return rates.assign(
        read_mb=turns["read_mb"].median(), disturbed=turns["disturbed"].mean(), mode=turns["mode"].first()
    ).reset_index()


def _ways(shape: ModelShape, trial: Trial) -> list[PlannedWay]:
    ours = {way.name: way for way in ways(bool(shape.experts)) if way.kind != RIVAL}
    for name in trial.names:
        if name not in ours:
            raise unknown("way", name, ours)
    return [ours[name] for name in trial.names or ours]


def _limit(shape: ModelShape, trial: Trial) -> int:
    if trial.dram_share is None:
        return max(sizes.footprint(shape, way).all_bytes for way in _ways(shape, trial))
    return round(trial.dram_share * shape.nbytes(sizes.ELEMENT_BYTES))


def _text(trial: Trial) -> list[Tensor]:
    """The tokens of a turn, one by one: evaluation text, since experts depend on it; of a twin, one again and again."""
    passes = SKIPPED + trial.tokens
    if trial.layers is not None:
        return [torch.tensor([[stand_ins.TOKEN]])] * passes
    tokens = load_tokens(CORPUS, load_model(trial.model, torch.bfloat16)[1], "evaluation").flatten()[:passes]
    return list(tokens.view(-1, 1, 1))


@cache
def _model(trial: Trial) -> nn.Module:
    """The model in bfloat16, or a twin of random weights."""
    if trial.layers is None:
        return load_model(trial.model, torch.bfloat16)[0]
    return twin_model(trial.model, trial.layers, torch.bfloat16, sparsity=0.0, vocabulary=VOCABULARY)
