"""The experts of a mixture that come from disk when a token needs them (CORM, section 4), and what chooses them."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from toolkit.formats import Packed
from toolkit.kernels import neurons as kernel
from toolkit.models.experts import Experts, Routed
from toolkit.offload.expert_slots import ExpertSlots
from toolkit.offload.linear import by_torch, multiplied_packed
from toolkit.offload.neuron_ffn import KERNEL_TOKENS, Maths, ffn_of
from toolkit.offload.turn import Offloaded
from toolkit.storage.experts import Bits, bits_of
from toolkit.storage.tensor_ranges import FileLayer
from toolkit.timeline import Recorder

Weights = Packed | Mapping[str, Packed]  # rows with all that an expert needs, or its linears `up` and `down`
Product = Callable[[Weights, Float[Tensor, "tokens hidden"]], Float[Tensor, "tokens hidden"]]


class Router:
    """The router of a mixture, which also foretells its choice from the input of the mixture before (CORM, 4.2)."""

    def __init__(self, experts: Experts):
        self.experts = experts

    def choose(self, x: Float[Tensor, "tokens hidden"], ids: Int64[Tensor, "tokens k"], weights: Tensor) -> Routed:
        """The experts of each token and the weights of their outputs: those that the model's own router gave."""
        return ids, weights

    def predict(self, x: Float[Tensor, "1 hidden"]) -> Int64[Tensor, "1 k"]:
        """The experts that this router names for the input of the mixture before, the likeliest first."""
        return self.experts.route(x)[0]

    def weigh(self, x: Float[Tensor, "1 hidden"], ids: Int64[Tensor, "1 k"]) -> Float[Tensor, "1 k"]:
        """The weights that the router gives to these experts."""
        return self.experts.weigh(self.experts.scores(x), ids)


class RecordedRouter(Router):
    """The experts that a trace has for one token after the other, all with the same weight, and what was predicted.

    For twins: the router of a model with random weights chooses as no trained one does. Tokens beyond the trace begin
    with its first again.
    """

    def __init__(self, experts: Experts, chosen: Int64[Tensor, "tokens k"], predicted: Int64[Tensor, "tokens k"]):
        super().__init__(experts)
        self._chosen, self._predicted, self._token = chosen, predicted, 0

    def choose(self, x: Float[Tensor, "1 hidden"], ids: Int64[Tensor, "1 k"], weights: Tensor) -> Routed:
        """The next token's experts."""
        recorded = self._chosen[self._token % len(self._chosen)][None]
        self._token += 1
        return recorded, self.weigh(x, recorded)

    def predict(self, x: Float[Tensor, "1 hidden"]) -> Int64[Tensor, "1 k"]:
        """The experts predicted for the next token."""
        return self._predicted[self._token % len(self._predicted)][None]

    def weigh(self, x: Float[Tensor, "1 hidden"], ids: Int64[Tensor, "1 k"]) -> Float[Tensor, "1 k"]:
        """The same for all, 1 together."""
        return torch.full(ids.shape, 1 / ids.shape[1])


class ExpertFFN(Offloaded):
    """Takes the place of the routed experts in a mixture. The mixture itself routes and adds its shared experts.

    Experts are added in the order of their numbers, so the result does not depend on the experts in memory. If the
    tokens of a prompt need more experts than there are slots, these come in parts.

    `products` give, for each expert, the output of its stored rows for some tokens. Without `keeps`, each token reads
    all experts that it needs. Without `reloads`, a token uses the experts that were predicted from the layer before,
    with the weights that the router gives them.
    """

    def __init__(
        self,
        layer: int,
        slots: ExpertSlots,
        products: list[Product],
        recorder: Recorder,
        keeps: bool = True,
        reloads: bool = True,
    ):
        super().__init__()
        self.layer, self.slots = layer, slots
        self.router: Router
        """Set once this module is in its place, since the mixture around it routes."""
        self.keeps, self.reloads, self._products, self._recorder = keeps, reloads, products, recorder
        self._following: list[ExpertFFN] = []  # at most one; in a list, it is no part of this module
        self._ahead: Int64[Tensor, "1 k"] | None = None

    def forward(self, x: Tensor, ids: Int64[Tensor, "tokens k"], weights: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden], in the type of `x`."""
        return self._run(x, ids, weights).to(x.dtype)

    def precede(self, other: "ExpertFFN") -> None:
        """Look ahead for another mixture, the next one that a token comes to."""
        self._following = [other]

    def look_ahead(self, x: Float[Tensor, "1 hidden"]) -> None:
        """Start to read the experts that this layer's router names for the input of the layer before (CORM, 4.2)."""
        begun_s = self._recorder.now_s()
        self._ahead = self.router.predict(x)
        self._recorder.record("compute", "predictor", "dram", begun_s, 0, self.layer)
        if not self.keeps:
            self.slots.clear()
        self.slots.prefetch(self._ahead[0].tolist())

    def close(self) -> None:
        """Release the memory, once no read goes there any more."""
        self.slots.clear()
        del self.slots, self.router, self._products

    def _run(self, x: Float[Tensor, "tokens hidden"], ids: Tensor, weights: Tensor) -> Float32[Tensor, "tokens hidden"]:
        ids, weights = self._chosen(x, ids, weights)
        if not self.keeps and self._ahead is None:
            self.slots.clear()
        self._ahead = None
        total = torch.zeros(x.shape, dtype=torch.float32)
        needed, count = np.unique(ids.numpy()), self.slots.cache.slots
        for first in range(0, len(needed), count):  # in parts that the slots can hold
            self.slots.bring(part := needed[first : first + count].tolist())
            for following in self._following if len(x) == 1 and first == 0 else ():
                following.look_ahead(x)
            for expert in part:
                self._add(expert, x, ids, weights, total)
        return total

    def _chosen(self, x: Float[Tensor, "tokens hidden"], ids: Tensor, weights: Tensor) -> Routed:
        if self.reloads or self._ahead is None or len(x) > 1:
            return self.router.choose(x, ids, weights)
        return self._ahead, self.router.weigh(x, self._ahead)

    def _add(
        self, expert: int, x: Tensor, ids: Tensor, weights: Tensor, total: Float32[Tensor, "tokens hidden"]
    ) -> None:
        """Add what an expert gives to the tokens that chose it."""
        stored, product = self.slots.weights(expert), self._products[expert]
        begun_s = self._recorder.now_s()
        if len(x) == 1:
            total.add_(product(stored, x) * weights[ids == expert])
        else:
            tokens, ranks = torch.where(ids == expert)
            total.index_add_(0, tokens, (product(stored, x[tokens]) * weights[tokens, ranks, None]).float())
        self._recorder.record("compute", "expert", "dram", begun_s, self.slots.runs[expert].nbytes, self.layer)


def products(experts: Experts, slots: ExpertSlots, scratch: UInt8[Tensor, " bytes"]) -> list[Product]:
    """The product of each expert, by the form in which it is stored. Prompts make blocks dense in `scratch`."""
    if isinstance(slots.runs[0], FileLayer):
        return [partial(_by_blocks, experts, number, scratch) for number in range(experts.count)]
    return [_product(experts, number, bits_of(run, experts.hidden)) for number, run in enumerate(slots.runs)]


def _by_blocks(
    experts: Experts, number: int, scratch: Tensor, weights: Mapping[str, Packed], x: Float[Tensor, "tokens hidden"]
) -> Tensor:
    """An expert whose linears are packed, by the arithmetic of its class between them."""
    up, down = experts.linears[number].up, experts.linears[number].down
    inner = experts.linears.inner(_times(weights["up"], x, up.bias, scratch))
    return _times(weights["down"], inner, down.bias, scratch)


def _times(weight: Packed, x: Tensor, bias: Tensor | None, scratch: Tensor) -> Tensor:
    """The product of a packed linear with each token, as it is or made dense, whichever is faster."""
    if len(x) > 1 and not multiplied_packed(weight, len(x), scratch):
        y = by_torch(x.to(weight.dtype), weight, scratch)
    else:
        y = weight.matvec(x[0])[None] if len(x) == 1 else weight.matvec(x)
    return y if bias is None else y + bias


def _product(experts: Experts, number: int, bits: Bits) -> Product:
    if experts.activation is None:
        return partial(_by_linears, experts, number)
    if bits is None:
        maths = Maths(experts.activation, gated=True)
        return lambda weights, x: ffn_of(weights.tensors["values"], None, x, maths)
    return partial(_by_record, experts.activation, bits)


def _by_record(activation: str, bits: int, weights: Packed, x: Float[Tensor, "tokens hidden"]) -> Tensor:
    of_records = partial(kernel.ffn, weights.tensors["values"].view(torch.uint8), activation=activation, bits=bits)
    return torch.cat([of_records(some) for some in x.float().split(KERNEL_TOKENS)])


def _by_linears(experts: Experts, number: int, stored: Packed, x: Float[Tensor, "tokens hidden"]) -> Tensor:
    """An expert of any form, by the arithmetic of its class."""
    up, down = experts.linears[number].up, experts.linears[number].down
    parts = stored.tensors["values"].view(-1).split([up.weight.numel(), down.weight.numel()])
    weights = [part.view(linear.weight.shape) for part, linear in zip(parts, (up, down), strict=True)]
    inner = experts.linears.inner(functional.linear(x, weights[0], up.bias))
    return functional.linear(inner, weights[1], down.bias)
