"""An FFN that reads neurons from disk: those that a token is predicted to need and that memory does not hold yet.

With a GPU, hot neurons of each layer stay in its memory, and the CPU computes a token's cold ones meanwhile. This is
Hermes-host (Hermes, section V-A): the most used neurons are chosen beforehand (section IV-B) and never change.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.kernels import neurons as kernel
from toolkit.models.activation import activation
from toolkit.offload.device import Cpu, Cuda
from toolkit.offload.neuron_store import NeuronStore
from toolkit.offload.turn import Offloaded
from toolkit.predictors import Context, Predictor
from toolkit.timeline import Recorder

KERNEL_TOKENS = 8  # at once; more of them multiply by torch's matrix product


@dataclass(frozen=True)
class Maths:
    """An FFN without its weights: its activation by name, whether it has a gate, and its threshold."""

    activation: str
    gated: bool
    threshold: float = 0.0


class NeuronFFN(Offloaded):
    """Takes the place of a decoder block's FFN.

    `store` holds neurons, which `NeuronReads` fetches. If it `passes`, other layers share its memory, and it is emptied
    before each use. Without a `predictor` the layer needs all its neurons. If tokens need more neurons than memory
    holds, the neurons come in parts, whose sums are added up. A pass of several tokens is a prompt: a predictor with a
    state needs all neurons for it, and starts with what fired.
    """

    def __init__(
        self,
        layer: int,
        store: NeuronStore,
        predictor: Predictor | None,
        maths: Maths,
        bias: Float[Tensor, " hidden"] | None,
        passes: bool,
        recorder: Recorder,
    ):
        super().__init__()
        self.layer, self.store, self.predictor, self.maths = layer, store, predictor, maths
        self.passes, self._bias, self._recorder = passes, bias, recorder
        self._every = np.arange(store.residency.units)
        self._learns = predictor is not None and predictor.stateful
        self._of_tokens: list[Int64[np.ndarray, " active"]] = []

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] → [..., hidden], in the type of `x`."""
        tokens = x.reshape(-1, x.shape[-1])
        return self._run(tokens).to(x.dtype).view(x.shape)

    def product(self, x: Float32[Tensor, " hidden"]) -> Float32[Tensor, " hidden"]:
        """The FFN's output for one token."""
        return self._run(x.view(1, -1)).view(-1)

    def close(self) -> None:
        """Release the memory."""
        del self.store

    def _run(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens hidden"]:
        active = self._needed(x)
        if self.passes:
            self.store.clear()
        sums, seen = [], []
        for part in self._parts(active):
            with self.store.fetch.managing():
                self.store.advance(part)
            begun_s = self._recorder.now_s()
            sums.append(ffn_of(*self.store.used, x, self.maths))
            self._recorder.record("compute", "ffn", "dram", begun_s, self.store.used[0].nbytes, self.layer)
            if self._learns:
                seen.append(self._fired(x))
        if self._learns:
            self._learn([np.sort(np.concatenate(parts)) for parts in zip(*seen, strict=True)])
        return reduce(Tensor.add_, sums if self._bias is None else [*sums, self._bias])

    def keep(self, tokens: int) -> None:
        """Drop the neurons that the last pass loaded and none of its first `tokens` needed."""
        if self._of_tokens[tokens:]:
            useless = np.setdiff1d(np.concatenate(self._of_tokens[tokens:]), np.concatenate(self._of_tokens[:tokens]))
            self.store.residency.forget(useless)

    def _needed(self, x: Float[Tensor, "tokens hidden"]) -> Int64[np.ndarray, " active"]:
        """The neurons that any of the tokens needs, rising."""
        if self.predictor is None or (self._learns and len(x) > 1):
            return self._every
        begun_s = self._recorder.now_s()
        self._of_tokens = [self.predictor.predict(Context(self.layer, (token,))) for token in x.float()]
        needed = self._of_tokens[0]
        if len(x) > 1:
            mask = np.zeros(len(self._every), dtype=bool)
            mask[np.concatenate(self._of_tokens)] = True
            needed = np.flatnonzero(mask)
        self._recorder.record("compute", "predictor", "dram", begun_s, self.predictor.nbytes, self.layer)
        return needed

    def _fired(self, x: Float[Tensor, "tokens hidden"]) -> list[Int64[np.ndarray, " active"]]:
        """The neurons in memory that each token activated."""
        begun_s = self._recorder.now_s()
        rows, bias = self.store.used
        found = fired(rows, bias, self.store.pointer[: len(rows)], x, self.maths)
        self._recorder.record("compute", "predictor", "dram", begun_s, 0, self.layer)
        return found

    def _learn(self, active: Sequence[Int64[np.ndarray, " active"]]) -> None:
        """Tell the predictor what the prompt's tokens, or the token last predicted, activated."""
        if len(active) > 1:
            self.predictor.start(active)
        else:
            self.predictor.observe(active[0])

    def _parts(self, active: Int64[np.ndarray, " active"]) -> Iterator[Int64[np.ndarray, " part"]]:
        """The neurons in parts that memory can hold, those held already first.

        All parts but the last fill the memory, so each drives out the one before, and no neuron is added twice.
        """
        rows = self.store.residency.rows
        if len(active) <= rows:
            yield active
            return
        held = self.store.residency.held[active]
        active = np.concatenate([active[held], active[~held]])
        for first in range(0, len(active), rows):
            yield np.sort(active[first : first + rows])


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

    The device computes its hot neurons for every token, predicted or not; those whose output does not exceed the
    threshold add nothing. So an exact predictor gives the same result as on the CPU, and any other one misses fewer
    neurons.
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
        """The sum of both, on the device. Its span ends when both parts are computed and added."""
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


def ffn_of(
    rows: Float[Tensor, "neurons width"], bias: Tensor | None, x: Float[Tensor, "tokens hidden"], maths: Maths
) -> Float32[Tensor, "tokens hidden"]:
    """The FFN of some neurons, by our kernel for a few tokens and by torch's products for many."""
    if len(x) <= KERNEL_TOKENS:
        return kernel.ffn(rows, x.contiguous(), maths.activation, bias, maths.threshold)
    down = rows.unflatten(1, (3 if maths.gated else 2, -1))[:, -1]
    return (_outputs(rows, bias, x.to(rows.dtype), maths) @ down).float()


def fired(
    rows: Float[Tensor, "neurons width"],
    bias: Tensor | None,
    numbers: Int64[np.ndarray, " neurons"],
    x: Float[Tensor, "tokens hidden"],
    maths: Maths,
) -> list[Int64[np.ndarray, " active"]]:
    """The neurons that each token activated among those in some rows, whose `numbers` are given."""
    active = (_outputs(rows, bias, x.to(rows.dtype), maths) != 0).cpu().numpy()
    return [numbers[token] for token in active]


def _outputs(rows: Tensor, bias: Tensor | None, x: Float[Tensor, "tokens hidden"], maths: Maths) -> Tensor:
    """The values of the rows' neurons for each token, [tokens, rows]; zero where the threshold is not exceeded."""
    *ups, _ = rows.unflatten(1, (3 if maths.gated else 2, -1)).unbind(1)
    outputs = activation(maths.activation)(functional.linear(x, ups[0], bias if len(ups) == 1 else None))
    if maths.gated:
        outputs *= functional.linear(x, ups[1])
    return outputs.masked_fill_(outputs.float().abs() <= maths.threshold, 0)
