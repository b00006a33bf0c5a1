"""Adapters trained so that a thresholded model gives its dense model's probabilities (distillation).

The loss of a token is the Kullback-Leibler divergence of the student's distribution from the teacher's over the whole
vocabulary (Hinton et al., 2015). Both have the same frozen weights. The student adds the adapters (LoRA: Hu et al.,
2022), and may have another activation. Its thresholds follow what its neurons give, so that the share of zeros stays.
Gradients pass active neurons.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.models.activation import replaced_by
from toolkit.models.adapters import Adapters, LowRankDifference, fingerprint, named_linears
from toolkit.models.cutting import attached
from toolkit.models.ffn import decoder_ffns
from toolkit.progress import progress
from toolkit.records import parse_json
from toolkit.recovery.running import RunningThresholds, check_shares, settle

KIND = "state of a distillation"
LOGITS_AT_ONCE = 128  # positions whose distributions are compared at a time
BETAS = (0.9, 0.95)  # of Adam
MEAN, SQUARE = ".mean", ".square"  # of gradients; names in the state
STEP = {"step": {"type": "integer"}, "loss": {"type": "number"}, "rate": {"type": "number"}}
CURVE = {"type": "array", "items": {"type": "object", "properties": STEP, "required": [*STEP]}}


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


def fresh(model: nn.Module, rank: int, down_rank: int, activation: str | None = None, seed: int = 0) -> Adapters:
    """Differences of zero for every decoder linear, thresholds of zero, and an activation if it is not the model's own.

    `right` is random and `left` zero, as LoRA starts. Down projections have a rank of their own.
    """
    ffns, generator = decoder_ffns(model), torch.Generator().manual_seed(seed)
    downs = {ffn.down for ffn in ffns}
    lows = {}
    for name, linear in named_linears(model):
        rows, columns = linear.weight.shape
        chosen = min(down_rank if linear in downs else rank, rows, columns)
        right = torch.randn(chosen, columns, generator=generator) / math.sqrt(columns)
        lows[name] = LowRankDifference(torch.zeros(rows, chosen), right)
    return Adapters(lows, torch.zeros(len(ffns)), activation)


def refitted(
    model: nn.Module, adapters: Adapters, windows: Int64[Tensor, "windows tokens"], zeros: Sequence[float]
) -> Adapters:
    """The same differences, with the thresholds that give each layer its share of zeros."""
    with adapted(model, adapters):
        return replace(adapters, thresholds=settle(model, windows, zeros))


def distil(
    model: nn.Module,
    tokens: Int64[Tensor, " n"],
    zeros: Sequence[float],
    start: Adapters,
    training: Training,
    state: Path | None = None,
) -> tuple[Adapters, list[dict[str, float]]]:
    """Train adapters for a dense model, from those given; and the loss (nats a token) of each step.

    Args:
        model: the dense model, on the device to train on; it is left as it was.
        tokens: text to train on.
        zeros: the share of zeros of each layer.
        start: adapters of every linear that is trained.
        training: steps, rates and seeds.
        state: a file that keeps the state of the training. If it holds one of this training, that goes on.

    Raises `UserError` for tokens, shares or adapters that do not fit the model, or a state of another training.
    """
    check_shares(model, zeros)
    if len(tokens) < training.sequence_length:
        raise UserError(f"{len(tokens)} tokens do not fill a sequence of {training.sequence_length}: give more text")
    run = _Run(model, zeros, start, training)
    key = {"training": asdict(training), "zeros": list(zeros), "model": fingerprint(model), "tokens": len(tokens)}
    if state is not None and state.exists():
        run.resume(state, key)
    with progress("distilling", training.steps, "steps") as bar:
        bar.update(len(run.curve))
        while len(run.curve) < training.steps:
            run.step(training.windows(tokens, len(run.curve)))
            if not run.finite():
                where = "" if state is None else f", and remove {state} if it is from another machine"
                raise UserError(f"step {len(run.curve)} gives no finite numbers: lower the learning rate{where}")
            bar.update()
            bar.set_postfix_str(f"KL {run.curve[-1]['loss']:.3f}", refresh=False)
            if state is not None and (len(run.curve) % training.keep_every == 0 or len(run.curve) == training.steps):
                run.keep(state, key)
    return run.adapters(), run.curve


class _Run:
    """A training under way: its parameters, thresholds, optimiser and curve."""

    def __init__(self, model: nn.Module, zeros: Sequence[float], start: Adapters, training: Training):
        self.model, self.training = model, training
        device = next(model.parameters()).device
        leaf = lambda tensor: tensor.detach().float().to(device, copy=True).requires_grad_()  # noqa: E731
        lows = {name: LowRankDifference(leaf(low.left), leaf(low.right)) for name, low in start.differences.items()}
        self.student = Adapters(lows, start.thresholds.clone(), start.activation)
        self.running = RunningThresholds(self.student.thresholds, zeros, training.follow)
        self.optimiser = torch.optim.Adam(self.parameters().values(), betas=BETAS)
        self.curve: list[dict[str, float]] = []

    def parameters(self) -> dict[str, Tensor]:
        """The trained tensors by name."""
        lows = self.student.differences.items()
        return {f"{name}.left": low.left for name, low in lows} | {f"{name}.right": low.right for name, low in lows}

    @torch.enable_grad()
    def step(self, windows: Int64[Tensor, "batch tokens"]) -> None:
        """One step of the optimiser; sequences run one by one, which bounds the memory."""
        rate, total = self.training.rate(len(self.curve)), 0.0
        self.optimiser.param_groups[0]["lr"] = rate
        self.optimiser.zero_grad()
        for window in windows.to(next(self.model.parameters()).device):
            with torch.no_grad():
                teacher = self.model.base_model(window[None], use_cache=False)[0]
            with adapted(self.model, self.student), self.running.applied(self.model):
                student = self.model.base_model(window[None], use_cache=False)[0]
            total += _backward(self.model.get_output_embeddings(), student, teacher, len(windows))
        self.optimiser.step()
        self.curve.append({"step": len(self.curve) + 1, "loss": total, "rate": rate})

    def finite(self) -> bool:
        """Whether the last step's loss, the parameters and the thresholds are finite numbers."""
        tensors = *self.parameters().values(), self.running.limits
        return math.isfinite(self.curve[-1]["loss"]) and all(bool(tensor.isfinite().all()) for tensor in tensors)

    def adapters(self) -> Adapters:
        """What has been learnt so far."""
        pairs = self.student.differences.items()
        lows = {name: LowRankDifference(low.left.detach().cpu(), low.right.detach().cpu()) for name, low in pairs}
        return replace(self.student, differences=lows, thresholds=self.running.limits.clone())

    def keep(self, file: Path, key: dict) -> None:
        """Replace the state on disk."""
        tensors = dict(self.parameters()) | {"limits": self.running.limits}
        for name, parameter in self.parameters().items():
            moments = self.optimiser.state[parameter]
            tensors |= {f"{name}{MEAN}": moments["exp_avg"], f"{name}{SQUARE}": moments["exp_avg_sq"]}
        tensor_files.save(file, KIND, {"key": json.dumps(key), "curve": json.dumps(self.curve)}, tensors)

    @torch.no_grad()
    def resume(self, file: Path, key: dict) -> None:
        """Go on from a state. Raises `UserError` if it is damaged or another training's."""
        about, tensors = tensor_files.load(file, KIND)
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if about.get("key") != json.dumps(key) or shapes != self._shapes():
            raise UserError(f"{file} holds another training: remove it, or name another file")
        curve = parse_json(about.get("curve", ""), CURVE | {"maxItems": self.training.steps}, file)
        if [row["step"] for row in curve] != list(range(1, len(curve) + 1)):
            raise UserError(f"{file}: the steps of the curve: expected 1, 2, 3 and so on: remove the file")
        for name, tensor in tensors.items():
            if tensor.dtype != torch.float32 or (name.endswith(SQUARE) and bool((tensor < 0).any())):
                raise UserError(f"{file}: {name}: expected float32 numbers, squares at least 0: remove the file")
        self.curve = curve
        self.running.limits.copy_(tensors["limits"])
        for name, parameter in self.parameters().items():
            parameter.copy_(tensors[name])
            self.optimiser.state[parameter] = {
                "step": torch.tensor(float(len(self.curve))),
                "exp_avg": tensors[f"{name}{MEAN}"].to(parameter.device),
                "exp_avg_sq": tensors[f"{name}{SQUARE}"].to(parameter.device),
            }

    def _shapes(self) -> dict[str, list[int]]:
        """The shapes of what `keep` writes, by name."""
        moments = {f"{name}{of}": p for name, p in self.parameters().items() for of in ("", MEAN, SQUARE)}
        return {name: list(p.shape) for name, p in (moments | {"limits": self.running.limits}).items()}


@contextmanager
def adapted(model: nn.Module, adapters: Adapters) -> Iterator[None]:
    """Inside the block, a model has the differences and the activation of adapters; its weights do not change.

    The thresholds are not put in place: trainings have running ones.
    """

    def add(low: LowRankDifference, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        (x,) = args
        return output + functional.linear(functional.linear(x, low.right.to(x.dtype)), low.left.to(x.dtype))

    linears = dict(named_linears(model))
    lows = adapters.differences.items()
    with (
        replaced_by(model, adapters.activation),
        attached(linears[name].register_forward_hook(partial(add, low)) for name, low in lows),
    ):
        yield


def _backward(
    head: nn.Module, student: Float[Tensor, "1 tokens hidden"], teacher: Float[Tensor, "1 tokens hidden"], share: int
) -> float:
    """Add the gradients of the mean divergence over `share`, a few positions at a time, and return its value.

    The head's logits of a whole sequence would take more memory than all else.
    """
    leaf, total = student.detach().requires_grad_(), 0.0
    parts = zip(leaf.split(LOGITS_AT_ONCE, dim=1), teacher.split(LOGITS_AT_ONCE, dim=1), strict=True)
    for ours, theirs in parts:
        with torch.no_grad():
            wanted = head(theirs).float().log_softmax(-1)
        found = head(ours).float().log_softmax(-1)
        loss = functional.kl_div(found, wanted, log_target=True, reduction="sum") / (student.shape[1] * share)
        loss.backward()
        total += loss.item()
    student.backward(leaf.grad)
    return total
