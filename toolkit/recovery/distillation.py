"""Adapters trained so that a thresholded model gives its dense model's probabilities (distillation).

The loss of a token is the Kullback-Leibler divergence of the student's distribution from the teacher's over the whole
vocabulary (Hinton et al., 2015). Both have the same frozen weights. The student adds the adapters (LoRA: Hu et al.,
2022), and may have another activation. Its thresholds follow a running quantile of its neurons' outputs, so that the
share of zeros stays.
Gradients pass active neurons.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.activation import replaced_by
from toolkit.models.adapters import Adapters, LowRankDifference, fingerprint, named_linears
from toolkit.models.cutting import attached
from toolkit.models.ffn import decoder_ffns
from toolkit.progress import progress
from toolkit.recovery.training import Training, train
from toolkit.sparsity.calibration import checked_windows
from toolkit.sparsity.thresholds import run_decoder

LOGITS_AT_ONCE = 128  # positions whose distributions are compared at a time
SAMPLE = 1 << 16  # magnitudes of a batch that a quantile is taken of


def fresh(model: nn.Module, rank: int, down_rank: int, activation: str | None = None) -> Adapters:
    """Differences of zero for every decoder linear, thresholds of zero, and an activation if it is not the model's own.

    `right` is random and `left` zero, as LoRA starts. Down projections have a rank of their own.
    """
    ffns, generator = decoder_ffns(model), torch.Generator().manual_seed(0)
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
    device = next(model.parameters()).device
    leaf = lambda tensor: tensor.detach().float().to(device, copy=True).requires_grad_()  # noqa: E731
    lows = {name: LowRankDifference(leaf(low.left), leaf(low.right)) for name, low in start.differences.items()}
    student = Adapters(lows, start.thresholds.clone(), start.activation)
    running = RunningThresholds(student.thresholds, zeros, training.follow)

    def gradients(windows: Int64[Tensor, "batch tokens"]) -> float:
        total = 0.0
        for window in checked_windows(model, windows).to(device):  # one by one, which bounds the memory
            with torch.no_grad():
                teacher = model.base_model(window[None], use_cache=False)[0]
            with adapted(model, student), running.applied(model):
                hidden = model.base_model(window[None], use_cache=False)[0]
            total += backward_divergence(model.get_output_embeddings(), hidden, teacher, len(windows))
        return total

    key = {"training": asdict(training), "zeros": list(zeros), "model": fingerprint(model), "tokens": len(tokens)}
    windows = partial(training.windows, tokens)
    limits = {"limits": running.limits}
    curve = train("distilling", training, sides_of(lows), gradients, windows, state, key, limits)
    lows = {name: LowRankDifference(low.left.detach().cpu(), low.right.detach().cpu()) for name, low in lows.items()}
    return replace(student, differences=lows, thresholds=running.limits.clone()), curve


def sides_of(differences: Mapping[str, LowRankDifference]) -> dict[str, Tensor]:
    """The tensors of differences, by name."""
    return {f"{name}.{side}": getattr(low, side) for side in ("left", "right") for name, low in differences.items()}


def quantile(outputs: Float[Tensor, "..."], zeros: float) -> float:
    """The smallest of (a regular sample of) the magnitudes that at least a share `zeros` of them does not exceed."""
    magnitudes = outputs.detach().flatten().abs().float()
    sample = magnitudes[:: max(1, len(magnitudes) // SAMPLE)]
    return sample.kthvalue(max(1, round(zeros * len(sample)))).values.item()


class RunningThresholds:
    """A threshold for each layer, drawn towards the quantile of each batch that runs under `applied`.

    Args:
        limits: the thresholds to start from; they are changed in place.
        zeros: the share of zeros of each layer.
        rate: how far a batch draws a threshold towards its own quantile, from 0 (not at all) to 1.
    """

    def __init__(self, limits: Float32[Tensor, " layers"], zeros: Sequence[float], rate: float):
        self.limits, self.zeros, self.rate = limits, zeros, rate

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside the block the model's FFNs cut their neurons, and the thresholds follow."""
        ffns = decoder_ffns(model)
        with attached(ffn.down.register_forward_pre_hook(partial(self._cut, at)) for at, ffn in enumerate(ffns)):
            yield

    def _cut(self, layer: int, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        (outputs,) = args
        found = quantile(outputs, self.zeros[layer])
        self.limits[layer] += self.rate * (found - self.limits[layer])
        return (outputs.masked_fill(outputs.abs() <= self.limits[layer].item(), 0),)


@torch.no_grad()
def settle(
    model: nn.Module, windows: Int64[Tensor, "windows tokens"], zeros: Sequence[float]
) -> Float32[Tensor, " layers"]:
    """The thresholds that give each layer its share of zeros with those of all other layers in place.

    Each is the mean over the windows of a window's quantile. Raises `UserError` for another number of shares than
    layers, a share outside [0, 1), or windows that do not fit the model.
    """
    check_shares(model, zeros)
    windows = checked_windows(model, windows)
    running = RunningThresholds(torch.zeros(len(zeros)), zeros, 1.0)
    with running.applied(model), progress("fitting thresholds", len(windows), "windows") as bar:
        for number, window in enumerate(windows, start=1):
            running.rate = 1 / number
            run_decoder(model, window)
            bar.update()
    return running.limits


def check_shares(model: nn.Module, zeros: Sequence[float]) -> None:
    """Raise `UserError` unless there is a share of zeros in [0, 1) for each layer."""
    if len(zeros) != (layers := len(decoder_ffns(model))):
        raise UserError(f"{len(zeros)} shares of zeros for {layers} layers: give one each")
    if wrong := [share for share in zeros if not 0 <= share < 1]:
        raise UserError(f"share of zeros {wrong[0]!r}: expected at least 0 and less than 1")


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


def backward_divergence(
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
