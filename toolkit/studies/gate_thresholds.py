"""Neurons cut where |act(gate)| does not exceed a threshold θ: how many, and at what price. Dense models and mixtures.

This is CORM's criterion (section 3): the activation function's value alone decides, and one θ holds for all layers. An
activation takes the place of the model's own, so experts that a token does not use are not counted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from toolkit.errors import UserError, unknown
from toolkit.models.activation import activation, activation_name, replaced
from toolkit.models.blocks import decoder_blocks
from toolkit.models.cutting import attached
from toolkit.studies.loaded import loaded
from toolkit.studies.quality import Alteration, EvaluationSettings

SILU_MINIMUM = -0.27846  # of x · sigmoid(x), at x = −1.2785
LOBES = {"both": 0, "negative": -1, "positive": 1}  # the sign of the values that a threshold cuts


class CutActivation(nn.Module):
    """An activation whose values up to θ in magnitude are zero, and the count of values up to each of `levels`.

    With a `lobe` other than "both", values of the other sign are neither cut nor counted.
    """

    def __init__(self, name: str, theta: float, levels: Sequence[float] = (), lobe: str = "both"):
        super().__init__()
        self.function, self.theta, self.levels = activation(name), theta, torch.tensor(levels)
        self.sign = LOBES[lobe]
        self.counts, self.total = torch.zeros(len(levels), dtype=torch.int64), 0

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """act(x), or 0."""
        values = self.function(x)
        sizes = values.abs()
        if self.sign:
            sizes = sizes.masked_fill(self.sign * values < 0, torch.inf)
        if len(self.levels):
            bins = torch.bucketize(sizes.float().flatten(), self.levels)
            self.counts += bins.bincount(minlength=len(self.levels) + 1)[:-1].cumsum(0)
            self.total += values.numel()
        return values.masked_fill(sizes <= self.theta, 0) if self.theta else values


@dataclass(frozen=True)
class Cut(Alteration):
    """All layers cut values up to θ, of one sign only if `lobe` names one. Raises `UserError` for a bad θ or lobe."""

    theta: float
    lobe: str = "both"

    def __post_init__(self):
        """Refuse what cannot be cut."""
        if not 0 <= self.theta < float("inf"):
            raise UserError(f"threshold {self.theta}: expected a number of at least 0")
        if self.lobe not in LOBES:
            raise unknown("lobe", self.lobe, LOBES)

    @contextmanager
    def change(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """Facts: ignored (mean share of neurons), next_token_accuracy (next tokens that the model ranks first)."""
        model, facts, right = loaded(settings.model)[0], {}, []

        def see(_: nn.Module, args: tuple[Tensor], output: CausalLMOutputWithPast) -> None:
            right.append((output.logits[0, :-1].argmax(-1) == args[0][0, 1:]).double().mean().item())

        cuts = [
            CutActivation(activation_name(model), self.theta, [self.theta], self.lobe) for _ in decoder_blocks(model)
        ]
        with replaced(model, cuts), attached([model.register_forward_hook(see)]):
            yield facts
        facts["ignored"] = sum(int(cut.counts[0]) for cut in cuts) / sum(cut.total for cut in cuts)
        facts["next_token_accuracy"] = sum(right) / len(right)
