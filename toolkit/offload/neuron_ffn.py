"""An FFN that reads neurons from disk: those that a token is predicted to need and that memory does not hold yet.

With a GPU, hot neurons of each layer stay in its memory, and the CPU computes a token's cold ones meanwhile. This is
Hermes-host (Hermes, section V-A): the most used neurons are chosen beforehand (section IV-B) and never change.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

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

MOST_CHECKED = 64  # tokens of a pass whose neurons are noted one by one, for `keep`
KERNEL_TOKENS = 8  # at once; more of them multiply by torch's matrix product
AT_ONCE_BYTES = 8 << 20  # of neurons that torch multiplies together
SHARE = 4  # of a layer's neurons about one in so many is added up for a token


@dataclass(frozen=True)
class Maths:
    """An FFN without its weights: its activation by name, whether it has a gate, and its threshold."""

    activation: str
    gated: bool
    threshold: float = 0.0


class NeuronFFN(Offloaded):
    """Takes the place of a decoder block's FFN.

    `store` holds neurons, which `NeuronReads` fetches. If it `passes`, other layers share its memory, and it is emptied
    before each use. Without a `predictor` the layer needs all its neurons. A pass of several tokens is a prompt: a
    predictor with a state needs all neurons for it, and starts with what fired.

    Each token is the sum over the neurons that are predicted for it, in the order of their numbers. So the result, to
    the bit, depends neither on the neurons that memory holds nor on how many it can hold. If tokens need more neurons
    than that, the neurons come in parts. With `computes_held`, a token is the sum over all neurons that memory holds
    then, also those that other tokens needed (the matrix of LLM in a flash, section 3.3): these may repair what a
    predictor misses, and results depend on the memory and on the tokens before.
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
        computes_held: bool = False,
    ):
        super().__init__()
        self.layer, self.store, self.predictor, self.maths = layer, store, predictor, maths
        self.passes, self.computes_held, self._bias, self._recorder = passes, computes_held, bias, recorder
        self._every = np.arange(store.residency.units)
        self._learns = predictor is not None and predictor.stateful
        self._row_bytes = store.matrix.shape[1] * store.matrix.itemsize
        self._at_once = max(1, AT_ONCE_BYTES // self._row_bytes)
        parts = kernel.parts_of(len(self._every) * self._row_bytes // SHARE)
        self._bounds = np.arange(parts + 1) * len(self._every) // parts
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

    def keep(self, tokens: int) -> None:
        """Drop the neurons that the last pass loaded and none of its first `tokens` needed."""
        if self._of_tokens[tokens:]:
            useless = np.setdiff1d(np.concatenate(self._of_tokens[tokens:]), np.concatenate(self._of_tokens[:tokens]))
            self.store.residency.forget(useless)

    def _run(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens hidden"]:
        return self._sum(x, self._needed(x))

    def _needed(self, x: Float[Tensor, "tokens hidden"]) -> "Needed":
        """The neurons that tokens need."""
        if self.predictor is None or (self._learns and len(x) > 1):
            return Needed(self._every)
        begun_s = self._recorder.now_s()
        of_tokens = [self.predictor.predict(Context(self.layer, (token,))) for token in x.float()]
        self._of_tokens = of_tokens if len(x) <= MOST_CHECKED else []  # a prompt's would take 100 MB
        needed = Needed.of(of_tokens, len(self._every))
        self._recorder.record("compute", "predictor", "dram", begun_s, self.predictor.nbytes, self.layer)
        return needed

    def _sum(self, x: Float[Tensor, "tokens hidden"], needed: "Needed") -> Float32[Tensor, "tokens hidden"]:
        """The sum over the neurons that tokens need, or over those that memory holds then."""
        if self.passes:
            self.store.clear()
        if self.computes_held:
            needed = self._with_held(needed.active)
        seen: list[list[Int64[np.ndarray, " active"]]] = []
        total = self._by_kernel(x, needed, seen) if len(x) <= KERNEL_TOKENS else self._by_torch(x, needed, seen)
        if self._learns:
            self._learn([np.sort(np.concatenate(parts)) for parts in zip(*seen, strict=True)])
        return total if self._bias is None else total.add_(self._bias)

    def _with_held(self, active: Int64[np.ndarray, " active"]) -> "Needed":
        """All that memory holds once these neurons are there; these alone if they come in parts."""
        if len(active) > self.store.residency.rows:
            return Needed(active)
        self._bring(active)
        return Needed(np.flatnonzero(self.store.residency.held), there=True)

    def _by_kernel(
        self, x: Float[Tensor, "tokens hidden"], needed: "Needed", seen: list
    ) -> Float32[Tensor, "tokens hidden"]:
        """By our kernel. Each partial sum is over a fixed range of neurons, whatever is in memory together."""
        store, partials = self.store, torch.zeros(len(self._bounds) - 1, *x.shape)
        for numbers in _split(needed.active, store.residency.rows):
            if not needed.there:
                self._bring(numbers)
            begun_s, wanted = self._recorder.now_s(), needed.wanted(numbers)
            settings = {"bias": store.bias, "threshold": self.maths.threshold, "wanted": wanted}
            where = store.row_of[numbers], np.searchsorted(numbers, self._bounds)
            kernel.add_listed(partials, store.matrix, *where, x, self.maths.activation, **settings)
            self._computed(begun_s, len(numbers))
            self._see(seen, numbers, self._rows(numbers) if self._learns else None, x)
        return partials.sum(0)

    def _by_torch(
        self, x: Float[Tensor, "tokens hidden"], needed: "Needed", seen: list
    ) -> Float32[Tensor, "tokens hidden"]:
        """By torch's products, of as many neurons at once whatever memory holds."""
        total = torch.zeros(x.shape)
        for numbers, rows in self._blocks(needed):
            begun_s = self._recorder.now_s()
            total += ffn_of(rows, self._biases(numbers), x, self.maths, needed.wanted(numbers))
            self._computed(begun_s, len(numbers))
            self._see(seen, numbers, rows, x)
        return total

    def _blocks(self, needed: "Needed") -> Iterator[tuple[Int64[np.ndarray, " block"], Float[Tensor, "block width"]]]:
        """The neurons, as many at a time, and their bundles side by side; good until the next ones."""
        held, at_once = self.store.residency.rows, self._at_once
        for group in _split(needed.active, max(at_once, held - held % at_once)):
            if len(group) > held:
                yield group, torch.cat([self._brought(part) for part in _split(group, held)])
                continue
            if not needed.there:
                self._bring(group)
            for block in _split(group, at_once):
                yield block, self._rows(block)

    def _brought(self, numbers: Int64[np.ndarray, " part"]) -> Float[Tensor, "part width"]:
        """A copy of some neurons' bundles; memory holds them then."""
        self._bring(numbers)
        return self._rows(numbers).clone()

    def _bring(self, numbers: Int64[np.ndarray, " part"]) -> None:
        """Have memory hold these neurons."""
        with self.store.fetch.managing():
            self.store.advance(numbers)

    def _rows(self, numbers: Int64[np.ndarray, " part"]) -> Float[Tensor, "part width"]:
        """The bundles of neurons in memory: in place where they follow each other, else copied together."""
        rows, matrix = self.store.row_of[numbers], self.store.matrix
        if len(rows) and (np.diff(rows) == 1).all():
            return matrix[rows[0] : rows[-1] + 1]
        return matrix[torch.from_numpy(rows)]

    def _biases(self, numbers: Int64[np.ndarray, " part"]) -> Float[Tensor, " part"] | None:
        biases = self.store.all_biases
        return None if biases is None else biases[torch.from_numpy(numbers)]

    def _computed(self, begun_s: float, neurons: int) -> None:
        self._recorder.record("compute", "ffn", "dram", begun_s, neurons * self._row_bytes, self.layer)

    def _see(
        self,
        seen: list,
        numbers: Int64[np.ndarray, " part"],
        rows: Float[Tensor, "part width"] | None,
        x: Float[Tensor, "tokens hidden"],
    ) -> None:
        """Add the neurons that each token activated to `seen`, if the predictor learns from them."""
        if self._learns:
            begun_s = self._recorder.now_s()
            seen.append(fired(rows, self._biases(numbers), numbers, x, self.maths))
            self._recorder.record("compute", "predictor", "dram", begun_s, 0, self.layer)

    def _learn(self, active: Sequence[Int64[np.ndarray, " active"]]) -> None:
        """Tell the predictor what the prompt's tokens, or the token last predicted, activated."""
        if len(active) > 1:
            self.predictor.start(active)
        else:
            self.predictor.observe(active[0])


@dataclass(frozen=True, eq=False)
class Needed:
    """The neurons that the tokens of a pass need: `active`, rising, those of any token.

    `masks` says which each token needs; None: each needs all of them. If they are `there`, memory holds them already.
    """

    active: Int64[np.ndarray, " active"]
    masks: Bool[np.ndarray, "tokens neurons"] | None = None
    there: bool = False

    @classmethod
    def of(cls, of_tokens: Sequence[Int64[np.ndarray, " active"]], neurons: int) -> Self:
        """The needs of tokens, given those of each one, of a layer with so many neurons."""
        if len(of_tokens) == 1:
            return cls(of_tokens[0])
        masks = np.zeros((len(of_tokens), neurons), dtype=bool)
        for mask, active in zip(masks, of_tokens, strict=True):
            mask[active] = True
        return cls(np.flatnonzero(masks.any(0)), masks)

    def wanted(self, numbers: Int64[np.ndarray, " part"]) -> Bool[np.ndarray, "tokens part"] | None:
        """Which token needs which of these neurons, all of which some token needs; None: each all."""
        return None if self.masks is None else self.masks[:, numbers]

    def split(self, hot: Bool[np.ndarray, " neurons"], tokens: int) -> tuple[Bool[np.ndarray, "tokens hot"], "Needed"]:
        """Which token needs which hot neuron, and what is needed of the others."""
        masks = np.zeros((tokens, len(hot)), dtype=bool)
        masks[:, self.active] = True if self.masks is None else self.masks[:, self.active]
        return masks[:, hot], Needed(self.active[~hot[self.active]], self.masks)


def _split(numbers: Int64[np.ndarray, " numbers"], size: int) -> list[Int64[np.ndarray, " part"]]:
    """So many numbers at a time; one part without any where there are none."""
    return np.split(numbers, range(size, len(numbers), size))


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

    The device computes those of its hot neurons that a token is predicted to need, so that results are those of the CPU
    alone, whatever the device holds. With `computes_held` it computes all of them for every token, so that a predictor
    misses fewer neurons; those whose output does not exceed the threshold add nothing.
    """

    def __init__(self, hot: HotNeurons, *arguments: object, **named: object):
        super().__init__(*arguments, **named)
        self.hot = hot
        self._is_hot = np.zeros(len(self._every), dtype=bool)
        self._is_hot[hot.numbers] = True

    def close(self) -> None:
        """Release the memory, the device's as well."""
        super().close()
        del self.hot

    def _run(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens hidden"]:
        """The sum of both, on the device. Its span ends when both parts are computed and added."""
        hot, on_cpu = self.hot, x.cpu()
        wanted, cold = self._needed(on_cpu).split(self._is_hot, len(x))
        if self.computes_held:
            wanted[:] = True
        begun_s = self._recorder.now_s()
        total = ffn_of(hot.rows, hot.bias, x, self.maths, wanted)  # launched; the CPU goes on
        self._hot_fired = fired(hot.rows, hot.bias, hot.numbers, x, self.maths, wanted) if self._learns else []
        total += self._sum(on_cpu, cold).to(total.device)
        hot.device.wait()
        self._recorder.record("compute", "ffn", hot.device.tier, begun_s, hot.rows.nbytes, self.layer)
        return total

    def _learn(self, active: Sequence[Int64[np.ndarray, " active"]]) -> None:
        super()._learn([np.union1d(cold, hot) for cold, hot in zip(active, self._hot_fired, strict=True)])


def ffn_of(
    rows: Float[Tensor, "neurons width"],
    bias: Tensor | None,
    x: Float[Tensor, "tokens hidden"],
    maths: Maths,
    wanted: Bool[np.ndarray, "tokens neurons"] | None = None,
) -> Float32[Tensor, "tokens hidden"]:
    """The FFN of some neurons, by our kernel for a few tokens and by torch's products for many.

    `wanted` says which token counts which neuron; None: each all.
    """
    counted = None if wanted is None else torch.from_numpy(wanted).to(rows.device)
    if len(x) <= KERNEL_TOKENS:
        return kernel.ffn(rows, x, maths.activation, bias, maths.threshold, wanted=counted)
    down = rows.unflatten(1, (3 if maths.gated else 2, -1))[:, -1]
    return (_outputs(rows, bias, x.to(rows.dtype), maths, counted) @ down).float()


def fired(
    rows: Float[Tensor, "neurons width"],
    bias: Tensor | None,
    numbers: Int64[np.ndarray, " neurons"],
    x: Float[Tensor, "tokens hidden"],
    maths: Maths,
    wanted: Bool[np.ndarray, "tokens neurons"] | None = None,
) -> list[Int64[np.ndarray, " active"]]:
    """The neurons that each token activated among those in some rows, whose `numbers` are given."""
    counted = None if wanted is None else torch.from_numpy(wanted).to(rows.device)
    active = (_outputs(rows, bias, x.to(rows.dtype), maths, counted) != 0).cpu().numpy()
    return [numbers[token] for token in active]


def _outputs(
    rows: Tensor,
    bias: Tensor | None,
    x: Float[Tensor, "tokens hidden"],
    maths: Maths,
    wanted: Bool[Tensor, "tokens rows"] | None = None,
) -> Tensor:
    """The values of the rows' neurons for each token, [tokens, rows]; zero where the threshold is not exceeded."""
    *ups, _ = rows.unflatten(1, (3 if maths.gated else 2, -1)).unbind(1)
    outputs = activation(maths.activation)(functional.linear(x, ups[0], bias if len(ups) == 1 else None))
    if maths.gated:
        outputs *= functional.linear(x, ups[1])
    if wanted is not None:
        outputs.masked_fill_(~wanted, 0)
    return outputs.masked_fill_(outputs.float().abs() <= maths.threshold, 0)
