"""Predictors of Hermes: a state of 4 bits for each neuron, and neurons of the layer before that predict it.

The state is the token-wise part (section IV-C1): tokens raise and lower it. A neuron's parents are the layer-wise part.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped, UInt8
from torch import Tensor, nn

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.models.ffn import decoder_ffns
from toolkit.predictors import state_table
from toolkit.predictors.predictor import Context
from toolkit.predictors.samples import Samples
from toolkit.predictors.weightless import Weightless
from toolkit.sparsity.trace import Trace

KIND, VERSION = "correlated neurons", "1"
ALWAYS, NEVER = 0.90, 0.02  # shares of a prompt's tokens from which a neuron starts at 15, and below which at 0
GAIN, LOSS = 4, 1
PARENTS = 2  # of each neuron
WEIGHT = 6  # of each parent, beside a state of up to 15
ROWS_AT_ONCE = 1024  # neurons whose parents are sought together


@dataclass(eq=False)
class TokenState(Weightless):
    """Predicts the neurons whose state reaches a threshold. A token that uses a neuron adds 4, another takes 1 away.

    13 and a token that uses the neuron give 15; 10 and one that does not give 9; 0 stays 0. A neuron that is not
    predicted is not computed, so nothing raises its state. In an engine, a neuron below the threshold never returns.

    Args:
        neurons: of the layer.
        hidden: inputs of its FFN.
        threshold: the state from which a neuron is predicted.
        gain: what a token adds that uses the neuron, up to 15 in all.
        loss: what another takes away, down to 0.

    Raises `UserError` for a threshold, gain or loss that is none.
    """

    name: ClassVar[str] = "token_state"
    stateful: ClassVar[bool] = True

    threshold: int = state_table.HIGHEST
    gain: int = GAIN
    loss: int = LOSS
    _table: UInt8[np.ndarray, " bytes"] = field(init=False, repr=False)

    def __post_init__(self):
        """Refuse impossible numbers."""
        if not (
            1 <= self.threshold <= 255
            and 0 <= self.gain <= state_table.HIGHEST
            and 0 <= self.loss <= state_table.HIGHEST
        ):
            raise UserError(
                f"threshold {self.threshold}, gain {self.gain}, loss {self.loss}: expected 1 to 255, and 0 to 15 each"
            )
        self.start([])

    @property
    def nbytes(self) -> int:
        """Bytes of the table: one for two neurons."""
        return table_nbytes(self.neurons)

    @property
    def states(self) -> UInt8[np.ndarray, " neurons"]:
        """The state of each neuron."""
        return state_table.unpacked(self._table, self.neurons)

    def start(self, prefill: Sequence[Int64[np.ndarray, " active"]]) -> None:
        """States by how often the prompt's tokens used each neuron; all are 0 without a prompt."""
        uses = np.bincount(np.concatenate([*prefill, np.empty(0, np.int64)]), minlength=self.neurons)
        self._table = state_table.packed(starting_states(uses / max(1, len(prefill))))

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons whose state reaches the threshold."""
        mask = np.empty(self.neurons, bool)
        state_table.predict(self._table, self.threshold, mask)
        return np.flatnonzero(mask)

    def observe(self, active: Int64[np.ndarray, " active"]) -> None:
        """Raise and lower the states."""
        state_table.observe(self._table, dense(active, self.neurons), self.gain, self.loss)


def starting_states(usage: Float[np.ndarray, " neurons"]) -> UInt8[np.ndarray, " neurons"]:
    """The first state: 0 for less than 2 % of a prompt's tokens, 15 for more than 90 %, and 14 equal steps between."""
    steps = state_table.HIGHEST - 1
    between = np.minimum(1 + np.floor((usage - NEVER) / (ALWAYS - NEVER) * steps), steps)
    return np.select([usage < NEVER, usage > ALWAYS], [0, state_table.HIGHEST], between).astype(np.uint8)


def table_nbytes(*neurons: int) -> int:
    """Bytes of the tables of layers with so many neurons: LLaMA-7B's take 232 KiB (Hermes, section IV-C1).

    >>> table_nbytes(*[4096 + 10752] * 32) // 1024
    232
    """
    return sum(-(-count // 2) for count in neurons)


def dense(active: Int64[np.ndarray, " active"], neurons: int) -> np.ndarray:
    """A boolean for each neuron."""
    mask = np.zeros(neurons, bool)
    mask[active] = True
    return mask


@dataclass(frozen=True, eq=False)
class Parents:
    """Two neurons of the layer before for each neuron.

    Args:
        neurons: their numbers, uint16 unless the layer before has more neurons: 14 bits of 16 for LLaMA-7B.
        before: neurons of the layer before.
    """

    neurons: Shaped[np.ndarray, "2 neurons"]
    before: int

    @classmethod
    def of(cls, before: Bool[Tensor, "tokens before"], after: Bool[Tensor, "tokens after"]) -> Self:
        """The two neurons of the layer before that each neuron is most correlated with over some tokens.

        The correlation is that of two variables of 0 and 1. Co-activations alone would choose the neurons that always
        fire, which predict nothing. Raises `UserError` for fewer than two neurons in the layer before.
        """
        if before.shape[1] < PARENTS:
            raise UserError(f"{before.shape[1]} neuron in the layer before: expected {PARENTS} or more")
        first = _standardised(before)
        best = [(_standardised(rows).T @ first).topk(PARENTS).indices for rows in after.split(ROWS_AT_ONCE, dim=1)]
        number = np.uint16 if before.shape[1] <= 1 << 16 else np.uint32
        return cls(np.ascontiguousarray(torch.cat(best).numpy().T.astype(number)), before.shape[1])


def _standardised(active: Bool[Tensor, "tokens neurons"]) -> Float[Tensor, "tokens neurons"]:
    """Mean 0 and length 1; 0 for a neuron that always did the same."""
    centred = active.float() - active.float().mean(0)
    length = centred.norm(dim=0)
    return centred / torch.where(length > 1e-3, length, torch.inf)


def find_parents(layers: Iterable[Bool[Tensor, "tokens neurons"]]) -> list[Parents | None]:
    """The parents of each layer's neurons, from which neurons were active for some tokens. The first layer has none."""
    found: list[Parents | None] = []
    before = None
    for active in layers:
        found.append(None if before is None else Parents.of(before, active))
        before = active
    return found


def parents_of(trace: Trace) -> list[Parents | None]:
    """The parents of each layer's neurons, from a calibration trace."""
    return find_parents(trace.active(layer).flatten(0, 1) for layer in range(trace.layers))


def save_parents(path: str | os.PathLike, model: str, parents: Sequence[Parents | None]) -> None:
    """Write the parents of a model's layers, with a checksum. Raises `UserError` for trouble with the disk."""
    tensors = {f"parents.{layer}": torch.from_numpy(one.neurons) for layer, one in enumerate(parents) if one}
    before = {f"before.{layer}": str(one.before) for layer, one in enumerate(parents) if one}
    about = {"version": VERSION, "model": model, "layers": str(len(parents))}
    tensor_files.save(path, KIND, about | before, tensors)


def load_parents(path: str | os.PathLike, model: str) -> list[Parents | None]:
    """The parents of this model's layers. Raises `UserError` for a file that is damaged or of another model."""
    about, tensors = tensor_files.load_for(path, KIND, (VERSION,), model)
    with tensor_files.consistent(path, KIND):
        sizes = [about.get(f"before.{layer}") for layer in range(int(about["layers"]))]
        return [
            Parents(tensors[f"parents.{layer}"].numpy(), int(before)) if before else None
            for layer, before in enumerate(sizes)
        ]


@dataclass(eq=False)
class StateAndParents(TokenState):
    """Predicts where state + λ · active parents reaches the threshold; a layer without parents goes by states alone.

    With λ of 6 and a threshold of 15 a state of 9 and one parent are enough, and so are 3 and two. Two parents alone
    give 12: they never predict a neuron that has been idle for long.

    Args:
        parents: of each neuron; None in the first layer.
        weight: λ, what each active parent adds.

    Raises `UserError` for parents of another number of neurons, or a weight that is none.
    """

    name: ClassVar[str] = "state_and_parents"
    trained: ClassVar[bool] = True

    parents: Parents | None = None
    weight: int = WEIGHT

    def __post_init__(self):
        """Refuse parents of another layer."""
        super().__post_init__()
        if not 0 <= self.weight <= 120:
            raise UserError(f"weight {self.weight}: expected 0 to 120")
        children = self.parents.neurons.shape[1] if self.parents else self.neurons
        if children != self.neurons:
            raise UserError(f"parents of {children} neurons for a layer of {self.neurons}: they are another model's")

    @classmethod
    def fit(cls, model: nn.Module, limits: Iterable[float], samples: Samples | None = None) -> list[Self]:
        """Parents are found in the samples. Raises `UserError` without samples, or with those of another model."""
        ffns = decoder_ffns(model)
        if samples is None or samples.layers != len(ffns):
            raise UserError(f"{cls.name} needs samples of {len(ffns)} layers: record them with this model")
        return cls.with_parents(model, find_parents(samples.active(layer) for layer in range(samples.layers)))

    @classmethod
    def with_parents(cls, model: nn.Module, parents: Sequence[Parents | None]) -> list[Self]:
        """A predictor for each layer of a model. Raises `UserError` for parents of another model."""
        ffns = decoder_ffns(model)
        if len(parents) != len(ffns):
            raise UserError(f"parents of {len(parents)} layers for a model of {len(ffns)}: they are another model's")
        return [cls(ffn.neurons, ffn.up.in_features, parents=one) for ffn, one in zip(ffns, parents, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the table and the parents."""
        return super().nbytes + (self.parents.neurons.nbytes if self.parents else 0)

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons whose sum reaches the threshold. Raises `UserError` if the layer before is another model's."""
        if self.parents is None or not context.active:
            return super().predict(context)
        mask = np.empty(self.neurons, bool)
        earlier = context.active[-1]
        if len(earlier) and earlier[-1] >= self.parents.before:
            raise UserError(f"neuron {earlier[-1]} fired in the layer before; its parents are of {self.parents.before}")
        active = dense(earlier, self.parents.before)
        state_table.predict(self._table, self.threshold, mask, self.parents.neurons, active, self.weight)
        return np.flatnonzero(mask)


@dataclass(eq=False)
class LayerCorrelation(StateAndParents):
    """Predicts the neurons both of whose parents are active: the layer-wise part alone, without states.

    In a layer without parents it predicts no neuron.
    """

    name: ClassVar[str] = "layer_correlation"

    threshold: int = PARENTS * WEIGHT
    gain: int = 0

    def start(self, prefill: Sequence[Int64[np.ndarray, " active"]]) -> None:
        """All states are 0, and stay so."""
        super().start([])

    def observe(self, active: Int64[np.ndarray, " active"]) -> None:
        """Tokens before do not matter."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parents."""
        return super().nbytes - table_nbytes(self.neurons)
