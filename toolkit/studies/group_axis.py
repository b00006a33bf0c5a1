"""The cost of groups of quantised weights along the neuron, where each neuron's bits stand alone.

Groups of 64 weights in 4 bits and of 16 in 2 bits, chosen by `hqq`, in all FFNs of a dense model:

- "records": `toolkit.quantization.neuron_records`, scales and zero points in 8 bits within a neuron;
- "along the neuron": the same groups, scales and zero points in 16 bits;
- "along the inputs": of each matrix, as runtimes expect it; for the down projection a group spans neurons;
- "across neurons": every group spans neurons, so that no neuron stands alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.kernels.neurons.records import group_of
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.progress import progress
from toolkit.quantization.hqq import Groupwise
from toolkit.quantization.neuron_records import decode, encode, record_bytes
from toolkit.studies.loaded import loaded
from toolkit.studies.quality import Alteration, EvaluationSettings, restored

RECORDS = "records"
AXES = {  # of gate, up and down, with a row for each neuron: whether groups lie across the rows
    RECORDS: (False, False, False),
    "along the neuron": (False, False, False),
    "along the inputs": (False, False, True),
    "across neurons": (True, True, True),
}

Matrices = tuple[Float[Tensor, "neurons hidden"], Float[Tensor, "neurons hidden"], Float[Tensor, "neurons hidden"]]


@dataclass(frozen=True)
class GroupAxis(Alteration):
    """All FFNs of a dense model in few bits, with groups along an axis of `AXES`."""

    axis: str
    bits: int

    @contextmanager
    def change(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """Facts: bits_per_weight (with scales and zero points) and gate_error, up_error, down_error.

        An error is ‖decoded − weight‖ / ‖weight‖ over all layers.
        """
        layers = [_matrices(ffn) for ffn in decoder_ffns(loaded(settings.model)[0])]
        with restored([weight for matrices in layers for weight in matrices]):
            bits = self.bits + 32 / group_of(self.bits)
            if self.axis == RECORDS:
                bits = 8 * record_bytes(layers[0][0].shape[1], self.bits) / (3 * layers[0][0].shape[1])
            yield {"bits_per_weight": bits} | _quantise(layers, self.axis, self.bits)


def _matrices(ffn: FFN) -> Matrices:
    """Views with a row for each neuron."""
    return ffn.gate.weight.data, ffn.up.weight.data, ffn.down.weight.data.T


def _quantise(layers: Sequence[Matrices], axis: str, bits: int) -> dict[str, float]:
    """Replace each layer's matrices by what they decode to; return the relative error of each of the three."""
    lost, whole = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    with progress(f"quantising FFNs to {bits} bits", len(layers), "layers") as bar:
        for matrices in layers:
            for part, (weight, found) in enumerate(zip(matrices, decoded(matrices, axis, bits), strict=True)):
                lost[part] += (found.float() - weight.float()).square().sum()
                whole[part] += weight.float().square().sum()
                weight.copy_(found)
            bar.update()
    return dict(zip(("gate_error", "up_error", "down_error"), (lost / whole).sqrt().tolist(), strict=True))


def decoded(matrices: Matrices, axis: str, bits: int) -> Matrices:
    """The matrices of an FFN as their quantised form decodes to."""
    if axis == RECORDS:
        return decode(encode(*matrices, bits), matrices[0].shape[1], bits)
    turned = [weight.T if across else weight for weight, across in zip(matrices, AXES[axis], strict=True)]
    rounded = [Groupwise.encode(weight.contiguous(), bits, group_of(bits)).decode() for weight in turned]
    gate, up, down = (weight.T if across else weight for weight, across in zip(rounded, AXES[axis], strict=True))
    return gate, up, down
