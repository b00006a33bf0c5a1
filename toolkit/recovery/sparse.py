"""From a dense model to sparse ones: zeros shared out over layers, adapters distilled, and a folder for each.

Shares of zeros are worked through from the lowest one: each training starts from the adapters of the one before it,
the first from those of a folder if the recipe names one. Unfinished work is kept in the cache, so that the same recipe
goes on where it was stopped.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.files import file_sha256, read_json, write_json
from toolkit.models.activation import activation
from toolkit.models.adapters import FILE, KIND, Adapters, as_stored, load, save
from toolkit.models.ffn import decoder_ffns
from toolkit.quality import perplexity
from toolkit.recovery import card
from toolkit.recovery.distillation import adapted, distil_sparse, fresh, refitted
from toolkit.recovery.training import Training, place
from toolkit.sparsity.calibration import Calibration
from toolkit.sparsity.shares import check_range, shares
from toolkit.sparsity.thresholds import thresholded, watched

FITTED_ON = Calibration(windows=8, sequence_length=256)  # windows that shares of zeros and thresholds are fitted on
SEQUENCE_LENGTH = 1024  # tokens of a window of the evaluation
ABOUT = """\
A threshold for each decoder block of `{model}` on |act(gate) · up|: what does not exceed it is zero. And adapters: a
difference of low rank for each decoder linear. `load_model("{name}")` loads `{model}`, adds them and cuts.{other}"""
OTHER = " `{}` takes the place\nof the model's own activation."
LOSS, AFTER = "distillation from the dense model's probabilities", ", after the\n  steps for lower shares of zeros"


@dataclass(frozen=True)
class Recipe:
    """How sparse versions of a model are made. Raises `UserError` for numbers that no version has."""

    model: str
    zeros: tuple[float, ...] = (0.8, 0.85, 0.9)
    """Mean shares of zeros over the layers, rising."""
    rank: int = 24
    """Rank of the difference of each decoder linear but the down projections; adapters to start from have their own."""
    down_rank: int = 80
    training: Training = field(default_factory=Training)
    later_steps: int = 100
    """Steps of each training but the first."""
    corpus: str = "wiki-slice"
    activation: str | None = None
    """The activation in place of the model's own, such as "relu"; None keeps it."""
    start: str | None = None
    """The folder of a sparse version of the same model, whose adapters the first training starts from."""

    def __post_init__(self):
        """Check the shares, the activation and the place to start from."""
        check_range(self.zeros)
        if list(self.zeros) != sorted(set(self.zeros)):
            raise UserError(f"shares of zeros {list(self.zeros)}: expected them to rise")
        if self.activation is not None:
            activation(self.activation)
        if self.start is not None and not (Path(self.start) / FILE).is_file():
            raise UserError(f"start {self.start}: expected the folder of a sparse version, with a file {FILE}")

    def names(self) -> list[str]:
        """The names of the versions, such as `smollm2-135m-relu-sparse80`."""
        kind = "sparse" if self.activation is None else f"{self.activation}-sparse"
        return [f"{Path(self.model).name}-{kind}{zeros * 100:g}" for zeros in self.zeros]

    def record(self) -> dict[str, Any]:
        """The recipe as files describe it: with the one of the adapters that it starts from, whose ranks stay."""
        fields = asdict(self)
        if self.start is not None:
            del fields["rank"], fields["down_rank"]
            fields["start"] = json.loads(tensor_files.load(Path(self.start) / FILE, KIND)[0]["recipe"])
        return fields

    def training_of(self, number: int) -> Training:
        """The training of share `number`, each with an order of the text of its own."""
        training = replace(self.training, seed=self.training.seed + number)
        return training if number == 0 else replace(training, steps=self.later_steps)


class SparseVersion(NamedTuple):
    """A sparse version of a model."""

    adapters: Adapters
    alone: Adapters
    """The thresholds and the activation for the same share of zeros, without differences."""
    curve: list[dict[str, float]]


def recover(recipe: Recipe, model: nn.Module, tokens: Int64[Tensor, " n"]) -> Iterator[SparseVersion]:
    """Make each version of a dense model, from text to train on.

    Raises `UserError` as `shares` and `distil` do, and for adapters to start from that are damaged or another model's.
    """
    if recipe.start is not None:
        file = Path(recipe.start) / FILE
        adapters, digest = replace(load(file, model), activation=recipe.activation), file_sha256(file)
    else:
        lows = fresh(model, recipe.rank, recipe.down_rank)
        adapters, digest = Adapters(lows, torch.zeros(len(decoder_ffns(model))), recipe.activation), None
    folder = place(recipe, model, [tokens], start=digest)
    windows, kept = FITTED_ON.draw(tokens), folder / "shares.json"
    if not kept.exists():  # the last digits of shares depend on the threads
        write_json(kept, {"shares": shares(model, windows, recipe.zeros)})
    for number, (name, layers) in enumerate(zip(recipe.names(), read_json(kept)["shares"], strict=True)):
        start, training = refitted(model, adapters, windows, layers), recipe.training_of(number)
        learnt, curve = distil_sparse(model, tokens, layers, start, training, folder / f"{name}.safetensors")
        adapters = refitted(model, replace(learnt, differences=as_stored(learnt.differences)), windows, layers)
        yield SparseVersion(adapters, refitted(model, replace(adapters, differences={}), windows, layers), curve)


def evaluated(
    model: nn.Module, tokens: Int64[Tensor, " n"], windows: int, adapters: Adapters | None = None
) -> dict[str, float]:
    """Perplexity and share of zeros on the first windows of a text; of the dense model without adapters."""
    zeros: list[float] = []
    with ExitStack() as stack:
        if adapters is not None:
            stack.enter_context(adapted(model, adapters))
            stack.enter_context(thresholded(model, adapters.thresholds))
        stack.enter_context(watched(model, lambda _, outputs: zeros.append((outputs == 0).double().mean().item())))
        return {"perplexity": float(perplexity(model, tokens, SEQUENCE_LENGTH, windows)), "zeros": fmean(zeros)}


def make(recipe: Recipe, out: Path, model: nn.Module, texts: Sequence[Int64[Tensor, " n"]], windows: int) -> None:
    """Make each version, evaluate it and write its folder in `out`.

    `texts` are calibration and evaluation tokens. Raises `UserError` as `recover` and `card.write` do.
    """
    tokens, evaluation = texts
    other = "" if recipe.activation is None else OTHER.format(recipe.activation)
    dense, record = evaluated(model, evaluation, windows), recipe.record()
    for number, (name, made) in enumerate(zip(recipe.names(), recover(recipe, model, tokens), strict=True)):
        versions = {"thresholds alone": made.alone, "recovered": made.adapters}
        rows = {"dense": dense} | {of: evaluated(model, evaluation, windows, it) for of, it in versions.items()}
        quality = pd.DataFrame([{"version": of, **row} for of, row in rows.items()])
        tables = {"quality.csv": quality.assign(relative=quality["perplexity"] / dense["perplexity"])}
        about, loss = ABOUT.format(name=name, model=recipe.model, other=other), LOSS + (AFTER if number else "")
        save_adapters = partial(save, base=model, adapters=made.adapters)
        card.write(out / name, about, loss, "sparse", record, made.curve, FILE, save_adapters, tables, windows)
