"""Which experts a token is sent to: those that the model's router chooses, or those of a trace."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from toolkit.models.experts import Experts, Routed


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
