"""A linear layer whose weight is elsewhere: it is fetched, made dense if its method asks for that, used and let go."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from toolkit.formats import Packed
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.kernels import bitmap
from toolkit.offload.timeline import Recorder

VECTORS = 16  # up to so many tokens at once are multiplied with the packed form; for more, making it dense pays


class OffloadedLinear(nn.Module):
    """Stands in for an `nn.Linear` of the same shape and bias; `fetch()` gives its weight, packed, while it runs.

    `scratch` is where weights are made dense, shared by all layers: as large as the largest of them.
    """

    def __init__(
        self, linear: nn.Linear, name: str, layer: int, fetch: Callable[[], Packed], scratch: Tensor, recorder: Recorder
    ):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.name, self.layer = name, layer
        self._fetch, self._scratch, self._recorder = fetch, scratch, recorder

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features], as the dense layer computes it, to the bit unless used packed."""
        packed = self._fetch()
        tokens = x.numel() // max(self.in_features, 1)
        if self._scratch.numel() == 0 and isinstance(packed, Endor) and tokens <= VECTORS:
            return self._multiply(x, packed)
        weight = self._dense(packed)
        with self._recorder.span("compute", self.name, "dram", weight.nbytes, self.layer):
            return functional.linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
