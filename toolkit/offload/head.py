"""An output head whose parts are streamed as layers are."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toolkit.offload.linear import OffloadedLinear


class OffloadedHead(nn.Module):
    """Takes the place of the head. Its parts give the logits of their words, one part after the other."""

    def __init__(self, parts: Sequence[OffloadedLinear]):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)
        self.bias = parts[0].bias  # of the first part; None if there is none

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch words"]:
        """The logits, as each part gives them."""
        return torch.cat([part(x) for part in self.parts], dim=-1)
