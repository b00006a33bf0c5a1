"""From a dense model to sparse ones: zeros shared out over layers, adapters distilled, and a folder for each.

Shares of zeros are worked through from the lowest one: each training starts from the adapters of the one before it,
the first from those of another recipe if it is told to.
Unfinished work is kept in the cache, so that the same recipe goes on where it was stopped.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from jaxtyping import Int64
from pydantic import Field
from torch import Tensor, nn

from toolkit.cache import shelf
from toolkit.errors import UserError
from toolkit.files import file_sha256, read_json, write_json
from toolkit.models.activation import activation
from toolkit.models.adapters import FILE, Adapters, LowRankDifference, fingerprint, load
from toolkit.models.ffn import decoder_ffns
from toolkit.pruning.calibration import Calibration
from toolkit.records import checked
from toolkit.recovery.distillation import distil, fresh, refitted
from toolkit.recovery.loop import Training
from toolkit.recovery.shares import check_range, shares

SHARE = Annotated[float, Field(ge=0, lt=1)]
FITTED_ON = Calibration(windows=8, sequence_length=256)  # windows that shares of zeros and thresholds are fitted on


@dataclass(frozen=True)
class Recipe:
    """How sparse versions of a model are made. Raises `UserError` for what nothing can be made with."""

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

    Raises `UserError` as `shares` and `distil` do, and for adapters to start from that are damaged or
    another model's.
    """
    adapters, digest = _start(recipe, model)
    place = shelf("recovery", asdict(recipe) | {"base": fingerprint(model), "start": digest})
    windows = FITTED_ON.draw(tokens)
    by_layer = _kept_shares(place / "shares.json", model, windows, recipe)
    for number, (zeros, layers) in enumerate(zip(recipe.zeros, by_layer, strict=True)):
        start = refitted(model, adapters, windows, layers)
        state = place / f"{recipe.name(zeros)}.safetensors"
        learnt, curve = distil(model, tokens, layers, start, recipe.training_of(number), state)
        adapters = refitted(model, rounded(learnt), windows, layers)
        alone = refitted(model, replace(adapters, differences={}), windows, layers)
        yield SparseVersion(zeros, adapters, start, alone, curve)


def rounded(adapters: Adapters) -> Adapters:
    """The differences as a file holds them."""
    lows = {
        name: LowRankDifference(low.left.bfloat16(), low.right.bfloat16()) for name, low in adapters.differences.items()
    }
    return replace(adapters, differences=lows)


def _start(recipe: Recipe, model: nn.Module) -> tuple[Adapters, str | None]:
    """The weights that the first training starts from, and the digest of their file."""
    if recipe.start is None:
        return fresh(model, recipe.rank, recipe.down_rank, recipe.activation), None
    file = Path(recipe.start) / FILE
    return replace(load(file, model), activation=recipe.activation), file_sha256(file)


def _kept_shares(file: Path, model: nn.Module, windows: Tensor, recipe: Recipe) -> list[list[float]]:
    """The shares of zeros of each layer, from the file if it has them: their last digits depend on the threads.

    Raises `UserError` for others in the file than lists of shares, one for each of the recipe's.
    """
    found = read_json(file).get("shares")
    if found is not None:
        layers = len(decoder_ffns(model))
        of_layers = Annotated[list[SHARE], Field(min_length=layers, max_length=layers)]
        found = checked(found, Annotated[list[of_layers], Field(min_length=len(recipe.zeros))], file)
    else:
        found = shares(model, windows, recipe.zeros)
        write_json(file, {"shares": found})
    return found
