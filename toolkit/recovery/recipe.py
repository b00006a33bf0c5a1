"""From a dense model to sparse ones: zeros shared out over layers, adapters distilled, and a folder for each.

Shares of zeros are worked through from the lowest one: each training starts from the adapters of the one before it.
What is under way is kept in the cache, so that the same recipe goes on where it was stopped.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor, nn

from toolkit.cache import shelf
from toolkit.errors import UserError
from toolkit.files import read_json, write_json
from toolkit.models.adapters import Adapters, LowRank, fingerprint
from toolkit.pruning.calibration import Calibration
from toolkit.recovery.distillation import Training, adapted, distil, fresh
from toolkit.recovery.running import settle
from toolkit.recovery.shares import check_range, shares

FITTED_ON = Calibration(windows=8, sequence_length=256)  # windows that shares of zeros and thresholds are fitted on


@dataclass(frozen=True)
class Recipe:
    """How sparse versions of a model are made. Raises `UserError` for what nothing can be made with."""

    model: str
    zeros: tuple[float, ...] = (0.8, 0.85, 0.9)
    """Mean shares of zeros over the layers, rising."""
    rank: int = 24
    """Of the difference of each decoder linear but the down projections."""
    down_rank: int = 80
    training: Training = field(default_factory=Training)
    later_steps: int = 100
    """Steps of each training but the first."""
    corpus: str = "wiki-slice"

    def __post_init__(self):
        """Check the numbers."""
        check_range(self.zeros)
        if list(self.zeros) != sorted(set(self.zeros)) or not self.zeros:
            raise UserError(f"shares of zeros {list(self.zeros)}: expected one or more, rising")
        numbers = {"rank": self.rank, "down_rank": self.down_rank, "later_steps": self.later_steps}
        for name, value in (numbers | asdict(self.training)).items():
            if name not in ("seed", "warm_up", "follow") and value <= 0:
                raise UserError(f"{name} {value}: expected more than 0")

    def name(self, zeros: float) -> str:
        """What the version with this share of zeros is called, such as `smollm2-135m-sparse80`."""
        return f"{Path(self.model).name}-sparse{zeros * 100:g}"

    def training_of(self, number: int) -> Training:
        """The training of share `number`, each with an order of the text of its own."""
        training = replace(self.training, seed=self.training.seed + number)
        return training if number == 0 else replace(training, steps=self.later_steps)


@dataclass(frozen=True, eq=False)
class Made:
    """A sparse version: the share of zeros asked for, its adapters, those it started from, and its curve."""

    zeros: float
    adapters: Adapters
    start: Adapters
    curve: list[dict[str, float]]


def recover(recipe: Recipe, model: nn.Module, tokens: Int64[Tensor, " n"]) -> Iterator[Made]:
    """Make each version of a dense model, from text to train on. Raises `UserError` as `shares` and `distil` do."""
    place = shelf("recovery", asdict(recipe) | {"base": fingerprint(model)})
    windows = FITTED_ON.draw(tokens)
    by_layer = _kept_shares(place / "shares.json", model, windows, recipe)
    adapters = fresh(model, recipe.rank, recipe.down_rank, by_layer[0], windows)
    for number, (zeros, layers) in enumerate(zip(recipe.zeros, by_layer, strict=True)):
        start = refitted(model, adapters, windows, layers)
        state = place / f"{recipe.name(zeros)}.safetensors"
        learnt, curve = distil(model, tokens, layers, start, recipe.training_of(number), state)
        adapters = refitted(model, rounded(learnt), windows, layers)
        yield Made(zeros, adapters, start, curve)


def refitted(
    model: nn.Module, adapters: Adapters, windows: Int64[Tensor, "windows tokens"], zeros: list[float]
) -> Adapters:
    """The same differences, with the thresholds that give each layer its share of zeros."""
    with adapted(model, adapters.differences):
        return replace(adapters, thresholds=settle(model, windows, zeros))


def rounded(adapters: Adapters) -> Adapters:
    """The differences as a file holds them."""
    lows = {name: LowRank(low.left.bfloat16(), low.right.bfloat16()) for name, low in adapters.differences.items()}
    return replace(adapters, differences=lows)


def _kept_shares(file: Path, model: nn.Module, windows: Tensor, recipe: Recipe) -> list[list[float]]:
    """The shares of zeros of each layer, from the file if it has them: their last digits depend on the threads."""
    found = read_json(file).get("shares")
    if found is None:
        found = shares(model, windows, recipe.zeros)
        write_json(file, {"shares": found})
    return found
