"""Hot neurons of each layer stay in a GPU's memory, and the CPU computes a token's cold ones meanwhile.

This is Hermes-host (Hermes, section V-A): the most used neurons are chosen beforehand (section IV-B) and never change.
A cold neuron that a token needs comes from DRAM, or from disk if DRAM does not hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from toolkit.errors import UserError
from toolkit.offload.device import Cpu, Cuda
from toolkit.offload.neuron_ffn import NeuronFFN, ffn_of, fired
from toolkit.offload.neuron_store import NeuronStore
from toolkit.timeline import Recorder


@dataclass(frozen=True, eq=False)
class HotNeurons:
    """A layer's neurons in the memory of `device`: their `numbers`, which rise, their bundles and their biases."""

    device: Cpu | Cuda
    numbers: Int64[np.ndarray, " hot"]
    rows: Float[Tensor, "hot width"]
    bias: Float[Tensor, " hot"] | None


def choose(
    usage: Sequence[Float[Tensor, " neurons"]], neurons: Sequence[int], nbytes: int, neuron_bytes: int
) -> list[Bool[np.ndarray, " neurons"]]:
    """Which neurons of each layer are hot: the most used of all layers, as many as fit into so many bytes.

    Neurons that are never used are not among them. Raises `UserError` for usage of other layers.
    """
    if [len(shares) for shares in usage] != list(neurons):
        raise UserError(f"usage of {[len(shares) for shares in usage]} neurons, by layer: expected {list(neurons)}")
    shares = torch.cat([*usage]).double().numpy()
    most = np.argsort(-shares, kind="stable")[: nbytes // neuron_bytes]
    hot = np.zeros(len(shares), dtype=bool)
    hot[most] = shares[most] > 0
    return np.split(hot, np.cumsum(neurons)[:-1])


def place(
    numbers: Int64[np.ndarray, " hot"], store: NeuronStore, device: Cpu | Cuda, recorder: Recorder, layer: int
) -> HotNeurons:
    """Read neurons and copy them to the device. They pass through the rows of a store that holds nothing yet."""
    width, dtype = store.matrix.shape[1], store.matrix.dtype
    row_bytes, some = width * dtype.itemsize, len(store.matrix)
    memory = device.empty(len(numbers) * row_bytes)
    for first in range(0, len(numbers), some):
        part = numbers[first : first + some]
        with store.fetch.managing():
            store.fetch(part, store.matrix[: len(part)])
        source = store.matrix[: len(part)].view(torch.uint8).numpy().reshape(-1)
        begun_s = recorder.now_s()
        device.copy(source, memory[first * row_bytes :][: len(source)])
        recorder.record("copy", "neurons", "dram", begun_s, len(source), layer)
    bias = None if store.all_biases is None else store.all_biases[torch.from_numpy(numbers)].to(device.torch_device)
    return HotNeurons(device, numbers, memory.view(dtype).view(len(numbers), width), bias)


class SplitFFN(NeuronFFN):
    """An FFN of hot neurons, which the device computes, and of cold ones, which the CPU computes at the same time.

    The device computes its hot neurons for every token, predicted or not: those whose output does not exceed the
    threshold add nothing. So a predictor that is exact gives what it gives on the CPU, and another one misses fewer.
    """

    def __init__(self, hot: HotNeurons, *arguments: object, **named: object):
        super().__init__(*arguments, **named)
        self.hot = hot
        self._cold = np.ones(len(self._every), dtype=bool)
        self._cold[hot.numbers] = False

    def close(self) -> None:
        """Release the memory, the device's as well."""
        super().close()
        del self.hot

    def _run(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens hidden"]:
        """The sum of both, on the device. Its span ends when the CPU is ready as well, and both have been added."""
        hot, begun_s = self.hot, self._recorder.now_s()
        total = ffn_of(hot.rows, hot.bias, x, self.maths)  # launched; the CPU goes on
        self._hot_fired = fired(hot.rows, hot.bias, hot.numbers, x, self.maths) if self._learns else []
        total += super()._run(x.cpu()).to(total.device)
        hot.device.wait()
        self._recorder.record("compute", "ffn", hot.device.tier, begun_s, hot.rows.nbytes, self.layer)
        return total

    def _needed(self, x: Float[Tensor, "tokens hidden"]) -> Int64[np.ndarray, " active"]:
        needed = super()._needed(x)
        return needed[self._cold[needed]]

    def _learn(self, active: Sequence[Int64[np.ndarray, " active"]]) -> None:
        super()._learn([np.union1d(cold, hot) for cold, hot in zip(active, self._hot_fired, strict=True)])
