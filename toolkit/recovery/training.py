"""The loop of every training here: steps of Adam, the state on disk, and the curve of losses."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


class TrainingRun(ABC):
    """A training under way: its parameters, optimiser and curve. A subclass sets its tensors before `__init__`."""

    def __init__(self, training: Training):
        self.training = training
        self.optimiser = torch.optim.Adam(self.parameters().values(), betas=BETAS)
        self.curve: list[dict[str, float]] = []

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """The trained tensors by name, float32."""

    def running_tensors(self) -> dict[str, Tensor]:
        """Other tensors that steps change in place, float32, by name."""
        return {}

    @abstractmethod
    def gradients(self, windows: Int64[Tensor, "batch tokens"]) -> float:
        """Add the gradients of one step, and return its loss in nats a token."""

    def train(
        self,
        name: str,
        windows: Callable[[int], Int64[Tensor, "batch tokens"]],
        state: Path | None = None,
        key: dict | None = None,
    ) -> None:
        """Take the steps that are left.

        Args:
            name: on the progress bar, such as "distilling".
            windows: the sequences of a step, the first being 0.
            state: a file that keeps the state of the training. If it holds one of this `key`, that goes on.
            key: the recipe of the training, and the model and text that it starts from.

        Raises `UserError` for a state of another training, or a step without finite numbers.
        """
        if state is not None and state.exists():
            self.resume(state, key)
        with progress(name, self.training.steps, "steps") as bar:
            bar.update(len(self.curve))
            while len(self.curve) < self.training.steps:
                self.step(windows(len(self.curve)))
                if not self.finite():
                    where = "" if state is None else f", and remove {state} if it is from another machine"
                    raise UserError(f"step {len(self.curve)} gives no finite numbers: lower the learning rate{where}")
                bar.update()
                bar.set_postfix_str(f"loss {self.curve[-1]['loss']:.3f}", refresh=False)
                done = len(self.curve) == self.training.steps
                if state is not None and (len(self.curve) % self.training.keep_every == 0 or done):
                    self.keep(state, key)

    @torch.enable_grad()
    def step(self, windows: Int64[Tensor, "batch tokens"]) -> None:
        """One step of the optimiser."""
        rate = self.training.rate(len(self.curve))
        self.optimiser.param_groups[0]["lr"] = rate
        self.optimiser.zero_grad()
        loss = self.gradients(windows)
        self.optimiser.step()
        self.curve.append({"step": len(self.curve) + 1, "loss": loss, "rate": rate})

    def finite(self) -> bool:
        """Whether the last step's loss, the parameters and the other tensors are finite numbers."""
        tensors = *self.parameters().values(), *self.running_tensors().values()
        return math.isfinite(self.curve[-1]["loss"]) and all(bool(tensor.isfinite().all()) for tensor in tensors)

    def keep(self, file: Path, key: dict) -> None:
        """Replace the state on disk."""
        tensors = self.parameters() | self.running_tensors()
        for name, parameter in self.parameters().items():
            moments = self.optimiser.state[parameter]
            tensors |= {f"{name}{MEAN}": moments["exp_avg"], f"{name}{SQUARE}": moments["exp_avg_sq"]}
        tensor_files.save(file, KIND, {"key": self._key(key), "curve": json.dumps(self.curve)}, tensors)

    @torch.no_grad()
    def resume(self, file: Path, key: dict) -> None:
        """Go on from a state. Raises `UserError` if it is damaged or another training's."""
        about, tensors = tensor_files.load(file, KIND)
        if about.get("key") != self._key(key):
            raise UserError(f"{file} holds another training: remove it, or name another file")
        self.curve = json.loads(about["curve"])
        for name, tensor in self.running_tensors().items():
            tensor.copy_(tensors[name])
        for name, parameter in self.parameters().items():
            parameter.copy_(tensors[name])
            self.optimiser.state[parameter] = {
                "step": torch.tensor(float(len(self.curve))),
                "exp_avg": tensors[f"{name}{MEAN}"].to(parameter.device),
                "exp_avg_sq": tensors[f"{name}{SQUARE}"].to(parameter.device),
            }

    def _key(self, key: dict) -> str:
        """The key of a training with the shapes of its parameters."""
        shapes = {name: list(parameter.shape) for name, parameter in self.parameters().items()}
        return json.dumps([key, shapes])
