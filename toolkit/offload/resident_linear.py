"""A linear layer whose weight stays in memory, with a quick product for single tokens."""

from jaxtyping import Float32
from torch import Tensor, nn
from torch.nn import functional

from toolkit.kernels import dense


class ResidentLinear(nn.Module):
    """Takes the place of an `nn.Linear`, whose weight and bias it keeps."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features], as `nn.Linear` gives it."""
        return functional.linear(x, self.weight, self.bias)

    def product(self, x: Float32[Tensor, " in_features"]) -> Float32[Tensor, " out_features"]:
        """The weight times `x`, plus the bias, in fp32."""
        y = dense.matvec(self.weight, x)
        return y if self.bias is None else y.add_(self.bias)
