"""The loop of every training here: steps of Adam, the state on disk, and the curve of losses."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from toolkit import tensor_files
from toolkit.cache import shelf
from toolkit.errors import UserError
from toolkit.models.adapters import fingerprint
from toolkit.progress import progress

KIND = "state of a training"
BETAS = (0.9, 0.95)  # of Adam


@dataclass(frozen=True)
class Training:
    """How adapters are trained. The learning rate rises over `warm_up` steps, and falls to 0 as a cosine does."""

    steps: int = 100
    batch: int = 4
    """Sequences a step."""
    sequence_length: int = 512
    learning_rate: float = 1e-3
    warm_up: int = 5
    follow: float = 0.05
    """How far a sequence draws a threshold towards its own quantile."""
    seed: int = 0
    keep_every: int = 5
    """Steps from one state on disk to the next."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, the first being 0."""
        rise = min(1, (step + 1) / max(1, self.warm_up))
        return self.learning_rate * rise * (1 + math.cos(math.pi * step / self.steps)) / 2

    def windows(self, tokens: Int64[Tensor, " n"], step: int) -> Int64[Tensor, "batch tokens"]:
        """The sequences of a step: each part of the text once, in random order, then again in another order.

        Raises `UserError` for a text that does not fill a sequence.
        """
        count = len(tokens) // self.sequence_length
        if not count:
            raise UserError(f"{len(tokens)} tokens do not fill a sequence of {self.sequence_length}: give more text")
        parts = tokens[: count * self.sequence_length].view(count, -1)
        numbers = range(step * self.batch, (step + 1) * self.batch)
        return torch.stack([parts[self._order(at // count, count)[at % count]] for at in numbers])

    def _order(self, epoch: int, count: int) -> Int64[Tensor, " count"]:
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))


def place(recipe: Any, model: nn.Module, texts: Sequence[Int64[Tensor, " n"]], **more: str | None) -> Path:
    """The folder in the cache for the unfinished work of a recipe, a dataclass, on a dense model and texts."""
    key = {"base": fingerprint(model), "tokens": [len(text) for text in texts], **more}
    return shelf("recovery", asdict(recipe) | key)


def train(
    name: str,
    training: Training,
    parameters: Mapping[str, Tensor],
    gradients: Callable[[Int64[Tensor, "batch tokens"]], float],
    windows: Callable[[int], Int64[Tensor, "batch tokens"]],
    state: Path,
    running: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[dict[str, float]]:
    """Train float32 parameters in place, and give the curve: step (from 1), loss in nats a token and rate of each step.

    Args:
        name: on the progress bar, such as "distilling".
        training: steps and rates.
        parameters: by name.
        gradients: adds those of one step, and returns its loss.
        windows: the sequences of a step, the first being 0.
        state: a file that keeps the state of this training. If it is there, the training goes on.
        running: other tensors that steps change in place, by name.

    Raises `UserError` for a step without finite numbers.
    """
    optimiser, curve = torch.optim.Adam(parameters.values(), betas=BETAS), []
    held = {**parameters, **running}
    for at, tensor in parameters.items():
        moments = {key: torch.zeros_like(tensor) for key in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(0.0)}
        optimiser.state[tensor] = moments
        held |= {f"{at}.{key}": moment for key, moment in moments.items()}
    if state.exists():
        about, kept = tensor_files.load(state, KIND)
        curve = json.loads(about["curve"])
        for at, tensor in held.items():
            tensor.data.copy_(kept[at])
    with progress(name, training.steps, "steps") as bar:
        bar.update(len(curve))
        while len(curve) < training.steps:
            rate = training.rate(len(curve))
            optimiser.param_groups[0]["lr"] = rate
            optimiser.zero_grad()
            with torch.enable_grad():
                loss = gradients(windows(len(curve)))
            optimiser.step()
            curve.append({"step": len(curve) + 1, "loss": loss, "rate": rate})
            if not math.isfinite(loss) or not all(bool(tensor.isfinite().all()) for tensor in held.values()):
                raise UserError(
                    f"step {len(curve)} gives no finite numbers: lower the learning rate, and remove {state} if it is "
                    "from another machine"
                )
            bar.update()
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            if len(curve) % training.keep_every == 0 or len(curve) == training.steps:
                tensor_files.save(state, KIND, {"curve": json.dumps(curve)}, held)
    return curve
