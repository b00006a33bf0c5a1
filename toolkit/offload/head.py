"""An output head in packed parts, which are streamed as layers are, or held (`toolkit.offload.held`)."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit.models.blocks import replace_module
from toolkit.offload.linear import OffloadedLinear


class OffloadedHead(nn.Module):
    """Takes the place of the head. Its parts give the logits of their words, one part after the other."""

    def __init__(self, parts: Sequence[OffloadedLinear], dtype: torch.dtype):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)
        self.bias = parts[0].bias  # of the first part; None if there is none
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """A tensor without memory, for a model that asks for the shape or the type of its head."""
        return torch.empty(self.out_features, self.in_features, dtype=self._dtype, device="meta")

    def stretches(self) -> Iterator[list[OffloadedLinear]]:
        """The parts whose weights are there at once: neighbours that stay, and each that passes by itself."""
        for stays, neighbours in groupby(self.parts, key=attrgetter("stays")):
            parts = [*neighbours]
            yield from [parts] if stays else ([part] for part in parts)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch words"]:
        """The logits, as each part gives them."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


def replace_head(model: nn.Module, parts: Sequence[OffloadedLinear]) -> None:
    """Put parts in the place of a model's head; see `OffloadedHead`."""
    head = model.get_output_embeddings()
    replace_module(model, head, OffloadedHead(parts, head.weight.dtype))
