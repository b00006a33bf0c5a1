"""From a dense model to sparse ones: zeros shared out over layers, adapters distilled, and a folder for each.

Shares of zeros are worked through from the lowest one: each training starts from the adapters of the one before it,
the first from those of a folder if the recipe names one. Unfinished work is kept in the cache, so that the same recipe
goes on where it was stopped.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import pandas as pd
from jaxtyping import Int64
from torch import Tensor, nn

from toolkit.cache import shelf
from toolkit.errors import UserError
from toolkit.files import file_sha256, read_json, write_json
from toolkit.models.activation import activation
from toolkit.models.adapters import FILE, Adapters, LowRankDifference, fingerprint, load, said_about, save
from toolkit.quality import evaluate_tasks, perplexity
from toolkit.recovery import card
from toolkit.recovery.distillation import adapted, distil, fresh, refitted
from toolkit.recovery.training import Training
from toolkit.sparsity.calibration import Calibration
from toolkit.sparsity.shares import check_range, shares
from toolkit.sparsity.thresholds import thresholded, watched

FITTED_ON = Calibration(windows=8, sequence_length=256)  # windows that shares of zeros and thresholds are fitted on
EARLIER_RECIPES = "earlier_recipes"  # an entry of the description in a file of adapters
ABOUT = """\
A threshold for each decoder block of `{model}` on |act(gate) · up|: what does not exceed it is zero. And adapters: a
difference of low rank for each decoder linear. `load_model("{name}")` loads `{model}`, adds them and cuts.{other}

{table}

Perplexity and the share of zeros are measured on {windows} windows of {sequence_length} tokens of evaluation text.

"""
OTHER = " `{}` takes the place\nof the model's own activation."
EARLIER = "* **Before**: the training starts from adapters of these recipes, the first one first: {}\n"
DISTILLED, AFTER = "distillation from the dense model's probabilities", ", after the\n  steps for lower shares of zeros"


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
        """Check the numbers."""
        check_range(self.zeros)
        if list(self.zeros) != sorted(set(self.zeros)) or not self.zeros:
            raise UserError(f"shares of zeros {list(self.zeros)}: expected one or more, rising")
        if self.activation is not None:
            activation(self.activation)
        if self.start is not None and not (Path(self.start) / FILE).is_file():
            raise UserError(f"start {self.start}: expected the folder of a sparse version, with a file {FILE}")
        numbers = {"rank": self.rank, "down_rank": self.down_rank, "later_steps": self.later_steps}
        for name, value in (numbers | asdict(self.training)).items():
            if name not in ("seed", "warm_up", "follow") and value <= 0:
                raise UserError(f"{name} {value}: expected more than 0")

    def name(self, zeros: float) -> str:
        """The name of the version with this share of zeros, such as `smollm2-135m-relu-sparse80`."""
        kind = "sparse" if self.activation is None else f"{self.activation}-sparse"
        return f"{Path(self.model).name}-{kind}{zeros * 100:g}"

    def record(self) -> dict:
        """The recipe as files describe it: the name only of the place to start from, and ranks where they count."""
        fields = asdict(self)
        if self.start is not None:
            del fields["rank"], fields["down_rank"]
            fields["start"] = Path(self.start).name
        return fields

    def training_of(self, number: int) -> Training:
        """The training of share `number`, each with an order of the text of its own."""
        training = replace(self.training, seed=self.training.seed + number)
        return training if number == 0 else replace(training, steps=self.later_steps)


@dataclass(frozen=True, eq=False)
class SparseVersion:
    """A sparse version: the share of zeros asked for, its adapters, those it started from, and its curve.

    `alone` has the thresholds and the activation for the same share of zeros, but no differences.
    """

    zeros: float
    adapters: Adapters
    start: Adapters
    alone: Adapters
    curve: list[dict[str, float]]


def recover(recipe: Recipe, model: nn.Module, tokens: Int64[Tensor, " n"]) -> Iterator[SparseVersion]:
    """Make each version of a dense model, from text to train on.

    Raises `UserError` as `shares` and `distil` do, and for adapters to start from that are damaged or another model's.
    """
    adapters, digest = fresh(model, recipe.rank, recipe.down_rank, recipe.activation), None
    if recipe.start is not None:
        file = Path(recipe.start) / FILE
        adapters, digest = replace(load(file, model), activation=recipe.activation), file_sha256(file)
    place = shelf("recovery", asdict(recipe) | {"base": fingerprint(model), "start": digest})
    windows, kept = FITTED_ON.draw(tokens), place / "shares.json"
    if not kept.exists():  # the last digits of shares depend on the threads
        write_json(kept, {"shares": shares(model, windows, recipe.zeros)})
    for number, (zeros, layers) in enumerate(zip(recipe.zeros, read_json(kept)["shares"], strict=True)):
        start = refitted(model, adapters, windows, layers)
        state = place / f"{recipe.name(zeros)}.safetensors"
        learnt, curve = distil(model, tokens, layers, start, recipe.training_of(number), state)
        adapters = refitted(model, _rounded(learnt), windows, layers)
        alone = refitted(model, replace(adapters, differences={}), windows, layers)
        yield SparseVersion(zeros, adapters, start, alone, curve)


def _rounded(adapters: Adapters) -> Adapters:
    """The differences as a file holds them."""
    lows = {
        name: LowRankDifference(low.left.bfloat16(), low.right.bfloat16()) for name, low in adapters.differences.items()
    }
    return replace(adapters, differences=lows)


@dataclass(frozen=True)
class Evaluation:
    """The data of the evaluation: tokens, and tasks of `toolkit.quality` if any."""

    tokens: Int64[Tensor, " n"]
    tokenizer: object
    windows: int = 6
    sequence_length: int = 1024
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None

    def of(self, model: nn.Module, adapters: Adapters | None = None) -> dict[str, float]:
        """Perplexity, share of zeros and accuracy by task; of the dense model without adapters."""
        zeros: list[float] = []
        with ExitStack() as stack:
            if adapters is not None:
                stack.enter_context(adapted(model, adapters))
                stack.enter_context(thresholded(model, adapters.thresholds))
            with watched(model, lambda _, outputs: zeros.append((outputs == 0).double().mean().item())):
                row = {"perplexity": float(perplexity(model, self.tokens, self.sequence_length, self.windows))}
            row["zeros"] = sum(zeros) / len(zeros)
            if self.tasks:
                found = evaluate_tasks(model, self.tokenizer, self.tasks, self.task_limit)
                for name, value, error in found[["task", "value", "standard_error"]].itertuples(index=False):
                    row |= {name: value, f"{name} (standard error)": error}
        return row

    def table(self, model: nn.Module, dense: dict[str, float], sparse: SparseVersion) -> pd.DataFrame:
        """A row for the dense model (as evaluated), for thresholds alone, and for the adapters."""
        rows = {
            "dense": dense,
            "thresholds alone": self.of(model, sparse.alone),
            "recovered": self.of(model, sparse.adapters),
        }
        found = pd.DataFrame([{"version": name, **row} for name, row in rows.items()])
        return found.assign(relative=found["perplexity"] / dense["perplexity"])


def write(
    folder: Path, model: nn.Module, recipe: Recipe, sparse: SparseVersion, quality: pd.DataFrame, on: Evaluation
) -> None:
    """Write a new folder of a sparse version. Raises `UserError` if it exists, and for trouble with the disk."""
    record, before = recipe.record(), earlier(recipe)
    said = {"model": recipe.model, "zeros": str(sparse.zeros), "recipe": json.dumps(record)}
    about = ABOUT.format(
        name=folder.name,
        model=recipe.model,
        other="" if recipe.activation is None else OTHER.format(recipe.activation),
        table=card.markdown(quality),
        windows=on.windows,
        sequence_length=on.sequence_length,
    )
    of = DISTILLED + ("" if sparse.zeros == recipe.zeros[0] else AFTER)
    notes = card.training_notes(of, "sparse", record, sparse.curve)
    notes += EARLIER.format(json.dumps(before)) if before else ""
    weights = partial(save, base=model, adapters=sparse.adapters, about=said | {EARLIER_RECIPES: json.dumps(before)})
    card.write(folder, about, notes, sparse.curve, FILE, weights, {"quality.csv": quality})


def earlier(recipe: Recipe) -> list[dict]:
    """The recipes of the adapters that this one starts from, in the order of the trainings."""
    if recipe.start is None:
        return []
    about = said_about(Path(recipe.start) / FILE)
    return [*json.loads(about.get(EARLIER_RECIPES, "[]")), json.loads(about["recipe"])]
