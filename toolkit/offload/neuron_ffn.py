"""An FFN whose neurons come from disk: those that a token is predicted to need, and that memory does not hold yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn import functional

from toolkit.kernels import neurons as kernel
from toolkit.models.activation import activation
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

    `store` holds neurons, which `NeuronReads` fetches; it is emptied before each use if it `passes`, since other layers
    share its memory then. Without a `predictor` the layer needs all its neurons. If tokens need more neurons than
    memory holds, the neurons come in parts, whose sums are added up. A pass of several tokens is a prompt: a predictor
    with a state needs all neurons for it, and starts with what fired.
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
        """Let go of neurons that the last pass loaded and none of its first `tokens` needed."""
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


def ffn_of(
    rows: Float[Tensor, "neurons width"], bias: Tensor | None, x: Float[Tensor, "tokens hidden"], maths: Maths
) -> Float32[Tensor, "tokens hidden"]:
    """The FFN of some neurons, by our kernel for a few tokens and by torch's products for many."""
    if len(x) <= KERNEL_TOKENS:
        return kernel.ffn(rows, x.contiguous(), maths.activation, bias, maths.threshold)
    return _of_many(rows, bias, x.to(rows.dtype), maths).float()


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


def _of_many(rows: Tensor, bias: Tensor | None, x: Float[Tensor, "tokens hidden"], maths: Maths) -> Tensor:
    """The same by torch's matrix products, in the type of the rows."""
    down = rows.unflatten(1, (3 if maths.gated else 2, -1))[:, -1]
    return _outputs(rows, bias, x, maths) @ down


def _outputs(rows: Tensor, bias: Tensor | None, x: Float[Tensor, "tokens hidden"], maths: Maths) -> Tensor:
    """The values of the rows' neurons for each token, [tokens, rows]; zero where the threshold is not exceeded."""
    *ups, _ = rows.unflatten(1, (3 if maths.gated else 2, -1)).unbind(1)
    outputs = activation(maths.activation)(functional.linear(x, ups[0], bias if len(ups) == 1 else None))
    if maths.gated:
        outputs *= functional.linear(x, ups[1])
    return outputs.masked_fill_(outputs.float().abs() <= maths.threshold, 0)
