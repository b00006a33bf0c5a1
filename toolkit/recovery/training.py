"""The loop of every training here: steps of Adam, the state on disk, and the curve of losses."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from jaxtyping import Int64
from torch import Tensor

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.progress import progress

KIND = "state of a distillation"
BETAS = (0.9, 0.95)  # of Adam
MEAN, SQUARE = ".mean", ".square"  # of gradients; names in the state


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
        """The sequences of a step: each part of the text once, in random order, then again in another order."""
        every = tokens[: len(tokens) // self.sequence_length * self.sequence_length].view(-1, self.sequence_length)
        numbers = range(step * self.batch, (step + 1) * self.batch)
        return torch.stack([every[self._order(at // len(every), len(every))[at % len(every)]] for at in numbers])

    def _order(self, epoch: int, count: int) -> Int64[Tensor, " count"]:
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))


def train(
    name: str,
    training: Training,
    parameters: Mapping[str, Tensor],
    gradients: Callable[[Int64[Tensor, "batch tokens"]], float],
    windows: Callable[[int], Int64[Tensor, "batch tokens"]],
    state: Path | None = None,
    key: dict | None = None,
    running: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[dict[str, float]]:
    """Train parameters in place, and give the curve: step (from 1), loss in nats a token and rate of each step.

    Args:
        name: on the progress bar, such as "distilling".
        training: steps and rates.
        parameters: by name, float32.
        gradients: adds those of one step, and returns its loss.
        windows: the sequences of a step, the first being 0.
        state: a file that keeps the state of the training. If it holds one of this `key`, that goes on.
        key: the recipe of the training, and the model and text that it starts from.
        running: other tensors that steps change in place, by name, float32.

    Raises `UserError` for a state that is damaged or another training's, or a step without finite numbers.
    """
    optimiser, curve = torch.optim.Adam(parameters.values(), betas=BETAS), []
    about = json.dumps(key)
    if state is not None and state.exists():
        curve = _resume(state, about, parameters, optimiser, running)
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
            tensors = *parameters.values(), *running.values()
            if not math.isfinite(loss) or not all(bool(tensor.isfinite().all()) for tensor in tensors):
                where = "" if state is None else f", and remove {state} if it is from another machine"
                raise UserError(f"step {len(curve)} gives no finite numbers: lower the learning rate{where}")
            bar.update()
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            if state is not None and (len(curve) % training.keep_every == 0 or len(curve) == training.steps):
                _keep(state, about, parameters, optimiser, running, curve)
    return curve


def _keep(
    file: Path,
    about: str,
    parameters: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    running: Mapping[str, Tensor],
    curve: list[dict[str, float]],
) -> None:
    """Replace the state on disk."""
    tensors = {**parameters, **running}
    for name, parameter in parameters.items():
        moments = optimiser.state[parameter]
        tensors |= {f"{name}{MEAN}": moments["exp_avg"], f"{name}{SQUARE}": moments["exp_avg_sq"]}
    tensor_files.save(file, KIND, {"key": about, "curve": json.dumps(curve)}, tensors)


@torch.no_grad()
def _resume(
    file: Path,
    about: str,
    parameters: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    running: Mapping[str, Tensor],
) -> list[dict[str, float]]:
    """Go on from a state; its curve. Raises `UserError` if it is damaged or another training's."""
    said, tensors = tensor_files.load(file, KIND)
    if said.get("key") != about or any(tensors[name].shape != tensor.shape for name, tensor in parameters.items()):
        raise UserError(f"{file} holds another training: remove it, or name another file")
    curve = json.loads(said["curve"])
    for name, tensor in running.items():
        tensor.copy_(tensors[name])
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
        optimiser.state[parameter] = {
            "step": torch.tensor(float(len(curve))),
            "exp_avg": tensors[f"{name}{MEAN}"].to(parameter.device),
            "exp_avg_sq": tensors[f"{name}{SQUARE}"].to(parameter.device),
        }
    return curve
