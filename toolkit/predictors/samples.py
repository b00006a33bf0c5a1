"""FFNs' inputs and their neurons' outputs: predictors are trained on them, and tested against them."""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from toolkit.models.ffn import decoder_ffns
from toolkit.progress import progress
from toolkit.sparsity.calibration import checked_windows, cut_windows
from toolkit.sparsity.thresholds import fed, run_decoder, thresholded, watched
from toolkit.sparsity.trace import Trace


@dataclass(frozen=True, eq=False)
class Samples:
    """For each layer and token: the input of the FFN and the outputs of its neurons; for each neuron, its norm.

    Args:
        inputs: after the FFN's norm.
        outputs: act(gate) · up with the thresholds in place: 0 where a neuron is not active.
        norms: the length of each neuron's down column. Output times norm is what a neuron adds to the hidden state.
        length: tokens of a sequence; each is read from a blank context. None where all tokens are one.
    """

    inputs: tuple[Float[Tensor, "tokens hidden"], ...]
    outputs: tuple[Float[Tensor, "tokens neurons"], ...]
    norms: tuple[Float32[Tensor, " neurons"], ...]
    length: int | None = None

    @property
    def layers(self) -> int:
        """Decoder blocks."""
        return len(self.inputs)

    def active(self, layer: int) -> Bool[Tensor, "tokens neurons"]:
        """Which neurons are active."""
        return self.outputs[layer] != 0

    def magnitudes(self, layer: int) -> Float32[Tensor, "tokens neurons"]:
        """The length of what each neuron adds to the hidden state."""
        return self.outputs[layer].float().abs() * self.norms[layer]

    def of_layers(self, layers: slice) -> "Samples":
        """The samples of some layers."""
        return Samples(self.inputs[layers], self.outputs[layers], self.norms[layers], self.length)

    @classmethod
    def of(cls, trace: Trace) -> "Samples":
        """A trace's samples, for predictors without weights: inputs of no width, outputs of 0 and 1, norms of 1."""
        active = [trace.active(layer).flatten(0, 1) for layer in range(trace.layers)]
        inputs = tuple(torch.zeros(len(one), 0) for one in active)
        return cls(inputs, tuple(active), tuple(map(torch.ones, trace.units)), trace.tokens.shape[1])

    @classmethod
    @torch.no_grad()
    def record(
        cls,
        model: nn.Module,
        thresholds: Float32[Tensor, " layers"],
        tokens: object,
        windows: int | None = None,
        sequence_length: int = 1024,
        criterion: str = "output",
    ) -> "Samples":
        """Run the model with the thresholds in place over the first windows of a row of token ids.

        It holds (hidden + neurons) numbers of the model's type for each token and layer: 1 GB for 8192 tokens of a
        model with 30 layers, 576 inputs and 1536 neurons. Raises `UserError` as `thresholded` does, or for tokens that
        do not fit the model.
        """
        ffns = decoder_ffns(model)
        cut = checked_windows(model, cut_windows(tokens, windows, sequence_length))
        inputs, outputs = ([[] for _ in ffns] for _ in range(2))

        def keep(parts: list[list[Tensor]], layer: int, values: Tensor) -> None:
            parts[layer].append(values.reshape(-1, values.shape[-1]))

        with (
            thresholded(model, thresholds, criterion),
            watched(model, partial(keep, outputs)),
            fed(model, partial(keep, inputs)),
            progress("recording samples", len(cut), "windows") as bar,
        ):
            for window in cut:
                run_decoder(model, window)
                bar.update()
        norms = (ffn.down.weight.detach().float().norm(dim=0).cpu() for ffn in ffns)
        return cls(tuple(map(torch.cat, inputs)), tuple(map(torch.cat, outputs)), tuple(norms), cut.shape[1])
