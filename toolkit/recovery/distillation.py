"""Adapters trained so that a thresholded model gives its dense model's probabilities (distillation).

The loss of a token is the Kullback-Leibler divergence of the student's distribution from the teacher's over the whole
vocabulary (Hinton et al., 2015). Both have the same frozen weights. The student adds the adapters (LoRA: Hu et al.,
2022), and may have another activation. Its thresholds follow a running quantile of its neurons' outputs, so that the
share of zeros stays.
Gradients pass active neurons.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.models.activation import replaced_by
from toolkit.models.adapters import Adapters, LowRankDifference, named_linears, sides
from toolkit.models.cutting import attached
from toolkit.models.ffn import decoder_ffns
from toolkit.progress import progress
from toolkit.recovery.training import Training, train
from toolkit.sparsity.calibration import checked_windows
from toolkit.sparsity.thresholds import run_decoder

LOGITS_AT_ONCE = 128  # positions whose distributions are compared at a time
SAMPLE = 1 << 16  # magnitudes of a batch that a quantile is taken of


def fresh(model: nn.Module, rank: int, down_rank: int) -> dict[str, LowRankDifference]:
    """Differences of zero for every decoder linear: `right` is random and `left` zero, as LoRA starts.

    Down projections have a rank of their own.
    """
    generator, downs = torch.Generator().manual_seed(0), {ffn.down for ffn in decoder_ffns(model)}
    lows = {}
    for name, linear in named_linears(model):
        rows, columns = linear.weight.shape
        chosen = min(down_rank if linear in downs else rank, rows, columns)
        right = torch.randn(chosen, columns, generator=generator) / math.sqrt(columns)
        lows[name] = LowRankDifference(torch.zeros(rows, chosen), right)
    return lows


def distil(
    model: nn.Module,
    tokens: Int64[Tensor, " n"],
    student: Callable[[Mapping[str, LowRankDifference]], AbstractContextManager],
    start: Mapping[str, LowRankDifference],
    training: Training,
    state: Path,
    running: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[dict[str, LowRankDifference], list[dict[str, float]]]:
    """Train low-rank differences of a dense model, which stays as it was; also the loss (nats a token) of each step.

    Args:
        tokens: text to train on.
        student: with the differences that are trained, a context that makes the student of the model.
        start: differences to start from, of every linear that is trained.
        state, running: as `train` takes them.

    Raises `UserError` for tokens that do not fit the model, and as `train` does.
    """
    device = next(model.parameters()).device
    leaf = lambda tensor: tensor.detach().float().to(device, copy=True).requires_grad_()  # noqa: E731
    lows = {name: LowRankDifference(*map(leaf, low)) for name, low in start.items()}

    def gradients(windows: Int64[Tensor, "batch tokens"]) -> float:
        total = 0.0
        for window in checked_windows(model, windows).to(device):  # one by one, which bounds the memory
            with torch.no_grad():
                teacher = model.base_model(window[None], use_cache=False)[0]
            with student(lows):
                hidden = model.base_model(window[None], use_cache=False)[0]
            total += backward_divergence(model.get_output_embeddings(), hidden, teacher, len(windows))
        return total

    windows = partial(training.windows, tokens)
    curve = train("distilling", training, sides(lows), gradients, windows, state, running)
    return {name: LowRankDifference(*(it.detach().cpu() for it in low)) for name, low in lows.items()}, curve


def distil_sparse(
    model: nn.Module,
    tokens: Int64[Tensor, " n"],
    zeros: Sequence[float],
    start: Adapters,
    training: Training,
    state: Path,
) -> tuple[Adapters, list[dict[str, float]]]:
    """Train adapters with a share of zeros for each layer. Arguments, result and errors are those of `distil`."""
    limits = start.thresholds.clone()

    @contextmanager
    def student(lows: Mapping[str, LowRankDifference]) -> Iterator[None]:
        with adapted(model, replace(start, differences=lows)), cutting(model, limits, zeros, lambda: training.follow):
            yield

    lows, curve = distil(model, tokens, student, start.differences, training, state, running={"limits": limits})
    return replace(start, differences=lows, thresholds=limits), curve


def refitted(
    model: nn.Module, adapters: Adapters, windows: Int64[Tensor, "windows tokens"], zeros: Sequence[float]
) -> Adapters:
    """The same differences, with the thresholds that give each layer its share of zeros."""
    with adapted(model, adapters):
        return replace(adapters, thresholds=settle(model, windows, zeros))


def quantile(outputs: Float[Tensor, "..."], zeros: float) -> float:
    """The smallest of (a regular sample of) the magnitudes that at least a share `zeros` of them does not exceed."""
    magnitudes = outputs.detach().flatten().abs().float()
    sample = magnitudes[:: max(1, len(magnitudes) // SAMPLE)]
    return sample.kthvalue(max(1, round(zeros * len(sample)))).values.item()


@contextmanager
def cutting(
    model: nn.Module, limits: Float32[Tensor, " layers"], zeros: Sequence[float], rate: Callable[[], float]
) -> Iterator[None]:
    """Inside the block the model's FFNs cut their neurons, and the thresholds, changed in place, follow.

    A batch moves a threshold towards its own quantile: not at all with a `rate` of 0, wholly with 1.
    """

    def cut(layer: int, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        (outputs,) = args
        limits[layer] += rate() * (quantile(outputs, zeros[layer]) - limits[layer])
        return (outputs.masked_fill(outputs.abs() <= limits[layer].item(), 0),)

    ffns = decoder_ffns(model)
    with attached(ffn.down.register_forward_pre_hook(partial(cut, layer)) for layer, ffn in enumerate(ffns)):
        yield


@torch.no_grad()
def settle(
    model: nn.Module, windows: Int64[Tensor, "windows tokens"], zeros: Sequence[float]
) -> Float32[Tensor, " layers"]:
    """The thresholds that give each layer its share of zeros with those of all other layers in place.

    Each is the mean over the windows of a window's quantile. Raises `UserError` for windows that do not fit the model.
    """
    windows, limits, seen = checked_windows(model, windows), torch.zeros(len(zeros)), 0
    bars = progress("fitting thresholds", len(windows), "windows")
    with cutting(model, limits, zeros, lambda: 1 / seen), bars as bar:
        for window in windows:
            seen += 1
            run_decoder(model, window)
            bar.update()
    return limits


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
