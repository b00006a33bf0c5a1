"""A mixture of experts whose routed experts come from disk when a token needs them (CORM, section 4)."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.kernels import neurons as kernel
from toolkit.models.experts import SharedFFN
from toolkit.offload.expert_slots import ExpertSlots
from toolkit.offload.neuron_ffn import KERNEL_TOKENS, Maths, ffn_of
from toolkit.offload.routing import Router
from toolkit.storage.experts import bits_of
from toolkit.timeline.spans import Recorder


class ExpertFFN(nn.Module):
    """Takes the place of a decoder block's mixture of experts.

    Experts are added in the order of their numbers, whatever memory holds, so the result depends on nothing else. If
    the tokens of a prompt need more experts than there are slots, these come in parts.

    Args:
        layer: its number.
        router: of the mixture.
        shared: the FFN that every token uses, of which a copy is made; None: there is none.
        slots: the routed experts.
        maths: what an expert computes.
        recorder: takes the spans.
        keeps: whether experts stay for the next token; if not, each token reads all that it needs.
        reloads: whether experts that were not predicted are read all the same. If not, a token goes on with those that
            were predicted from the layer before, with the weights that the router gives these.
    """

    def __init__(
        self,
        layer: int,
        router: Router,
        shared: SharedFFN | None,
        slots: ExpertSlots,
        maths: Maths,
        recorder: Recorder,
        keeps: bool = True,
        reloads: bool = True,
    ):
        super().__init__()
        self.layer, self.router, self.slots, self.maths = layer, router, slots, maths
        self.keeps, self.reloads, self._recorder = keeps, reloads, recorder
        self._following: list[ExpertFFN] = []  # at most one; in a list, it is no part of this module
        self._ahead: Int64[Tensor, "1 k"] | None = None
        self._shared = None if shared is None else _neurons_of(shared)
        self._share = None if shared is None else shared.share
        self._bits = [bits_of(run, router.experts.hidden) for run in slots.runs]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] → [..., hidden], in the type of `x`."""
        tokens = x.reshape(-1, x.shape[-1])
        return self._run(tokens).to(x.dtype).view(x.shape)

    def product(self, x: Float32[Tensor, " hidden"]) -> Float32[Tensor, " hidden"]:
        """The mixture's output for one token."""
        return self._run(x.view(1, -1)).view(-1)

    def precede(self, other: "ExpertFFN") -> None:
        """Look ahead for another mixture, the next one that a token comes to."""
        self._following = [other]

    def look_ahead(self, x: Float[Tensor, "1 hidden"]) -> None:
        """Start to read the experts that this layer's router names for the input of the layer before (CORM, 4.2)."""
        begun_s = self._recorder.now_s()
        self._ahead = self.router.predict(x)
        self._recorder.record("compute", "predictor", "dram", begun_s, self.router.nbytes, self.layer)
        if not self.keeps:
            self.slots.clear()
        self.slots.prefetch(self._ahead[0].numpy())

    def close(self) -> None:
        """Release the memory. Running the layer afterwards raises `UserError`."""
        self.slots.clear()
        self.slots, self.router, self._shared, self._run = None, None, None, _closed

    def _run(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens hidden"]:
        ids, weights = self._route(x)
        if not self.keeps and self._ahead is None:
            self.slots.clear()
        self._ahead = None
        total = self._shared_output(x)
        for part in self._parts(np.unique(ids.numpy())):
            self.slots.bring(part)
            for following in self._following if len(x) == 1 else ():
                following.look_ahead(x)
            for expert in part.tolist():
                self._add(expert, x, ids, weights, total)
        return total

    def _route(
        self, x: Float[Tensor, "tokens hidden"]
    ) -> tuple[Int64[Tensor, "tokens k"], Float32[Tensor, "tokens k"]]:
        begun_s = self._recorder.now_s()
        if self.reloads or self._ahead is None or len(x) > 1:
            routed = self.router.route(x)
        else:
            routed = self._ahead, self.router.weigh(x, self._ahead)
        self._recorder.record("compute", "router", "dram", begun_s, self.router.nbytes, self.layer)
        return routed

    def _parts(self, needed: Int64[np.ndarray, " needed"]) -> Iterator[Int64[np.ndarray, " part"]]:
        """The experts in parts that the slots can hold, by their number."""
        slots = self.slots.cache.slots
        for first in range(0, len(needed), slots):
            yield needed[first : first + slots]

    def _add(
        self, expert: int, x: Tensor, ids: Tensor, weights: Tensor, total: Float32[Tensor, "tokens hidden"]
    ) -> None:
        """Add what an expert gives to the tokens that chose it."""
        neurons = self.slots.neurons(expert)
        begun_s = self._recorder.now_s()
        if len(x) == 1:
            total.add_(self._product(neurons, self._bits[expert], x) * weights[ids == expert])
        else:
            tokens, ranks = torch.where(ids == expert)
            output = self._product(neurons, self._bits[expert], x[tokens])
            total.index_add_(0, tokens, output * weights[tokens, ranks, None])
        self._recorder.record("compute", "expert", "dram", begun_s, neurons.nbytes, self.layer)

    def _product(
        self, neurons: Shaped[Tensor, "neurons width"], bits: int | None, x: Tensor
    ) -> Float32[Tensor, "tokens hidden"]:
        if bits is None:
            return ffn_of(neurons, None, x, self.maths)
        of_records = partial(kernel.ffn, neurons.view(torch.uint8), activation=self.maths.activation, bits=bits)
        return torch.cat([of_records(some) for some in x.float().split(KERNEL_TOKENS)])

    def _shared_output(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens hidden"]:
        """The output of the FFN that every token uses; zeros if there is none."""
        if self._shared is None:
            return torch.zeros(x.shape, dtype=torch.float32)
        begun_s = self._recorder.now_s()
        output = ffn_of(self._shared, None, x, self.maths)
        if (share := self._share) is not None:
            output *= torch.sigmoid(nn.functional.linear(x.to(share.dtype), share).float())
        self._recorder.record("compute", "shared", "dram", begun_s, self._shared.nbytes, self.layer)
        return output


def _neurons_of(shared: SharedFFN) -> Float[Tensor, "neurons width"]:
    return torch.cat([shared.gate, shared.up, shared.down.T], dim=1)


def _closed(x: Tensor) -> Tensor:
    raise UserError("this model was closed: open its folder again")
