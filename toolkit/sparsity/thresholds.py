"""Thresholds on the outputs of FFN neurons: fitted on text for a wanted share of zeros, and applied to a model.

    sizes = Magnitudes.measure(model, tokens, windows=8)
    with thresholded(model, sizes.thresholds(0.7)):
        perplexity(model, tokens)

The output of a neuron is what the down projection takes in: act(gate) · up, or act(up) without a gate. A neuron is
active where the magnitude of its output exceeds the threshold of its layer (TEAL: Liu et al., 2024). With a threshold
of 0 these are the non-zero outputs of a ReLU. By the criterion "gate" the magnitude of act(gate) alone decides (CATS:
Lee et al., 2024): a gate in memory gives it before the rest of the FFN is loaded.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.models.activation import activation, activation_name, replaced
from toolkit.models.cutting import attached
from toolkit.models.ffn import decoder_ffns
from toolkit.models.streams import run_decoder
from toolkit.progress import progress
from toolkit.sparsity.calibration import checked_windows, cut_windows

DROPPED_BITS = 16  # of fp32's: magnitudes are told apart as bf16 tells them, which makes 32768 bins
BINS = 1 << (31 - DROPPED_BITS)
INFINITE = 0x7F80  # the first bin that holds no finite number
CRITERIA = ("output", "gate")


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """How many outputs of a layer's neurons have a magnitude in each bin. A bin is one positive number of bf16."""

    counts: Int64[Tensor, "layers bins"]

    @classmethod
    @torch.no_grad()
    def measure(
        cls,
        model: nn.Module,
        tokens: object,
        windows: int | None = None,
        sequence_length: int = 1024,
        criterion: str = "output",
    ) -> "Magnitudes":
        """Count over the first windows of a row of token ids, by one of `CRITERIA`.

        Raises `UserError` for tokens that do not fit the model, activations that are not finite, or an unknown FFN.
        """
        cut = checked_windows(model, cut_windows(tokens, windows, sequence_length))
        counts = torch.zeros(len(decoder_ffns(model)), BINS, dtype=torch.int64)

        def count(layer: int, outputs: Tensor) -> None:
            counts[layer] += bins_of(outputs)

        with watched(model, count, criterion), progress("measuring activations", len(cut), "windows") as bar:
            for window in cut:
                run_decoder(model, window)
                bar.update()
        return cls(counts)

    def __post_init__(self):
        """Raise `UserError` for activations that are not finite."""
        if self.counts[:, INFINITE:].any():
            raise UserError("activations are not finite: load the model in bfloat16 or float32")

    def thresholds(self, zeros: float | Sequence[float]) -> Float32[Tensor, " layers"]:
        """The smallest thresholds that set at least a share of outputs to zero; one share for all layers, or one each.

        Raises `UserError` for a share outside [0, 1), or another number of shares than layers.
        """
        shares = [zeros] * len(self.counts) if isinstance(zeros, int | float) else list(zeros)
        if len(shares) != len(self.counts):
            raise UserError(f"{len(shares)} shares of zeros for {len(self.counts)} layers: give one each")
        if wrong := [share for share in shares if not 0 <= share < 1]:
            raise UserError(f"share of zeros {wrong[0]!r}: expected at least 0 and less than 1")
        below = self.counts.cumsum(1)
        needed = torch.tensor([math.ceil(share * int(all_)) for share, all_ in zip(shares, below[:, -1], strict=True)])
        bins = torch.searchsorted(below, needed[:, None]).squeeze(1)
        edges = ((bins + 1 << DROPPED_BITS) - 1).int().view(torch.float32)  # the largest number of each bin
        return edges.masked_fill(bins == 0, 0)  # zeros alone need no threshold

    def sparsity(self, thresholds: Float32[Tensor, " layers"]) -> Float[Tensor, " layers"]:
        """The share of zeros that thresholds, as `thresholds` makes them, give each layer."""
        bins = thresholds.view(torch.int32) >> DROPPED_BITS
        below = self.counts.cumsum(1)
        return below.gather(1, bins.long()[:, None]).squeeze(1) / below[:, -1]


def bins_of(outputs: Float[Tensor, "*tokens neurons"]) -> Int64[Tensor, " bins"]:
    """How many outputs have a magnitude in each bin."""
    bins = outputs.float().abs().view(torch.int32) >> DROPPED_BITS
    return bins.flatten().bincount(minlength=BINS).cpu()


@contextmanager
def thresholded(
    model: nn.Module, thresholds: Float32[Tensor, " layers"], criterion: str = "output"
) -> Iterator[nn.Module]:
    """Inside the block, outputs of neurons that do not exceed their layer's threshold, by the criterion, are zero.

    Raises `UserError` for an unknown FFN or criterion, an FFN without the gate that the criterion looks at, or another
    number of thresholds than blocks.
    """
    blocks = len(decoder_ffns(model))
    if len(thresholds) != blocks:
        raise UserError(f"{len(thresholds)} thresholds for {blocks} decoder blocks: they are another model's")

    def cut(layer: int, values: Tensor, sizes: Tensor) -> Tensor:
        return values.masked_fill(sizes.float().abs() <= float(thresholds[layer]), 0)  # a NaN stays

    with changed(model, cut, criterion):
        yield model


@contextmanager
def watched(model: nn.Module, see: Callable[[int, Tensor], None], criterion: str = "output") -> Iterator[None]:
    """Inside the block, `see(layer, outputs)` gets the outputs of the neurons, [..., neurons], whenever a layer runs.

    Inside `thresholded` these are the outputs with the thresholds in place. By the criterion "gate" it gets act(gate).
    Raises `UserError` as `thresholded` does.
    """

    def look(layer: int, _: Tensor, sizes: Tensor) -> None:
        see(layer, sizes)

    with changed(model, look, criterion):
        yield


@contextmanager
def fed(model: nn.Module, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside the block, `see(layer, x)` gets the input of each FFN, [..., hidden], before its neurons are computed."""

    def look(layer: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        see(layer, args[0])

    firsts = (ffn.linears[0] for ffn in decoder_ffns(model))
    with attached(first.register_forward_pre_hook(partial(look, layer)) for layer, first in enumerate(firsts)):
        yield


@contextmanager
def changed(
    model: nn.Module, change: Callable[[int, Tensor, Tensor], Tensor | None], criterion: str = "output"
) -> Iterator[None]:
    """Inside the block, `change(layer, values, sizes)` gives what takes the place of `values`; None leaves them.

    By the criterion "output", both are the outputs of a layer's neurons. By "gate" the values are what the gate
    projection gives, and the sizes act(gate); a value of 0 makes an output of 0, since activations map 0 to 0. Raises
    `UserError` as `thresholded` does.
    """
    ffns = decoder_ffns(model)
    if criterion not in CRITERIA:
        raise unknown("criterion", criterion, CRITERIA)
    if criterion == "output":
        outputs = lambda layer, _, args: change(layer, args[0], args[0])  # noqa: E731
        hooks = [ffn.down.register_forward_pre_hook(partial(outputs, layer)) for layer, ffn in enumerate(ffns)]
    else:
        if any(ffn.gate not in ffn.linears for ffn in ffns):
            raise UserError("the model's FFNs have no linear that is their gate: take the criterion 'output'")
        act = activation(activation_name(model))
        gates = lambda layer, _, __, gate: change(layer, gate, act(gate))  # noqa: E731
        hooks = [ffn.gate.register_forward_hook(partial(gates, layer)) for layer, ffn in enumerate(ffns)]
    with attached(hooks):
        yield


def fatrelu(model: nn.Module, limits: Float32[Tensor, " layers"]) -> AbstractContextManager[nn.Module]:
    """Inside the block, the activation of each decoder block is a FATReLU: x where x exceeds its limit, else 0.

    LLM in a flash (sections 3 and C.5) runs models that were trained with it, or with ReLU, which has a limit of 0.
    Here the activation is replaced without training.

    Raises `UserError` for another number of limits than blocks, or a block without a known activation.
    """
    return replaced(model, [nn.Threshold(limit, 0.0) for limit in limits.tolist()])


@torch.no_grad()
def gate_limits(model: nn.Module, windows: Int64[Tensor, "windows tokens"], zeros: float) -> Float32[Tensor, " layers"]:
    """The limits of FATReLU that a share of each layer's gates does not exceed (of its up projection without a gate).

    They are the mean of the windows' quantiles, with the model's own activation in place. Raises `UserError` for
    windows that do not fit the model.
    """
    ffns, windows = decoder_ffns(model), checked_windows(model, windows)
    limits = torch.zeros(len(ffns))

    def see(layer: int, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        values = output.float().flatten()
        limits[layer] += values.kthvalue(max(1, round(zeros * len(values)))).values.cpu() / len(windows)

    gates = enumerate(ffn.gate or ffn.up for ffn in ffns)
    with attached(gate.register_forward_hook(partial(see, layer)) for layer, gate in gates):
        for window in windows:
            run_decoder(model, window)
    return limits
