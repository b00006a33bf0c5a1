"""The cost of fewer bits, predicted experts and skipped neurons for a mixture of experts (CORM, tables 1 and 2).

    mixture = RoutedModel("smollm2-135m-moe-upcycled")
    compared(mixture.text, expert_variants(mixture, VARIANTS))

With `as_predicted`, a model uses the predictions of the layer before (section 4.2). That layer's input goes through
this layer's gate, which names the experts, and through their W1, which names the neurons whose |act(W1 · x)| exceeds θ.
The first mixture is exact.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.nn import functional

from toolkit.models.activation import activation, activation_name
from toolkit.models.blocks import decoder_blocks
from toolkit.models.experts import Experts
from toolkit.papers.corm.routing import RoutedModel, limits, samples
from toolkit.predictors.next_layer import predict_experts
from toolkit.quantization.expert_bits import bits_by_usage
from toolkit.quantization.groups import levels, rounded
from toolkit.sparsity.recording import mixtures
from toolkit.studies.loaded import loaded
from toolkit.studies.quality import Alteration, EvaluationSettings, restored

GROUPS = {4: 64, 2: 16}  # weights that share a scale (CORM, appendix)
HALF = 16
AT_ONCE = 1 << 17  # weights that are rounded at once: what is between stays in the cache, 3 times as fast as a matrix
MIXED, LOW_SHARE = "mixed", 0.25  # 4 bits, and 2 for this share of a layer's experts, least used by calibration text
# of each variant: bits of experts and of attention, whether experts are foretold, whether neurons are skipped
VARIANTS = {
    "16 bits": (HALF, HALF, False, False),
    "foretold experts": (HALF, HALF, True, False),
    "skipped neurons": (HALF, HALF, False, True),
    "foretold experts, skipped neurons": (HALF, HALF, True, True),
    "4 bits": (4, 4, False, False),
    "4 bits, foretold experts, skipped neurons": (4, 4, True, True),
    "4 bits, a quarter of the experts in 2": (MIXED, 4, False, False),
    "4 bits, a quarter of the experts in 2, foretold experts, skipped neurons": (MIXED, 4, True, True),
    "2 bits, attention in 4": (2, 4, False, False),
    "4 bits, attention in 16": (4, HALF, False, False),  # as `pack --method experts` stores them
    "4 bits, a quarter of the experts in 2, attention in 16": (MIXED, HALF, False, False),
    "2 bits, attention in 16": (2, HALF, False, False),
}


@contextmanager
def as_predicted(
    model: nn.Module, experts: bool = True, thresholds: Sequence[float] | Float32[Tensor, " layers"] | None = None
) -> Iterator[None]:
    """Inside the block, mixtures use the predictions of the layer before.

    Args:
        experts: the experts, and with `thresholds` their neurons, are foretold; else they are the layer's own.
        thresholds: θ of each mixture; None: no neuron is skipped.

    Raises `UserError` for a model without experts.
    """
    found, seen = mixtures(model), {}

    def compute(number: int, x: Tensor, *_: Tensor) -> Tensor:
        seen[number] = x
        before = seen[number - 1] if experts and number else x
        limit = None if thresholds is None else float(thresholds[number])
        return routed_output(found[number], x, before, activation_name(model), limit).to(x.dtype)

    try:
        for number, each in enumerate(found):
            each.routed.forward = partial(compute, number)  # a hook would come after the experts, which take as long
        yield
    finally:
        for each in found:
            each.routed.__dict__.pop("forward", None)


@torch.no_grad()
def routed_output(
    experts: Experts,
    x: Float[Tensor, "tokens hidden"],
    before: Float[Tensor, "tokens hidden"],
    act: str,
    limit: float | None = None,
) -> Float32[Tensor, "tokens hidden"]:
    """The routed experts' output for `x` with the experts, and over a limit the neurons, that `before` names.

    The weights are those that the router gives these experts for `x`.
    """
    ids = predict_experts(before, experts)
    weights, total = experts.weigh(experts.scores(x), ids), torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        tokens, ranks = torch.where(ids == expert)
        gate, up, down = experts.matrices(expert)
        inner = activation(act)(functional.linear(x[tokens], gate)) * functional.linear(x[tokens], up)
        if limit is not None:
            inner *= activation(act)(functional.linear(before[tokens], gate)).float().abs() > limit
        total.index_add_(0, tokens, (inner @ down).float() * weights[tokens, ranks, None])
    return total


@dataclass(frozen=True)
class ExpertVariant(Alteration):
    """A mixture with fewer bits, rounded to nearest in groups of `GROUPS`, that uses predicted experts and neurons."""

    facts_at_once: ClassVar[bool] = True

    setting: RoutedModel
    """The calibration text that says which experts are used least, and what limits skipped neurons have."""
    bits: int | str = HALF
    """Bits of the experts: 16, 4, 2, or `MIXED`."""
    attention: int = HALF
    """Bits of the blocks' other linears."""
    foretold: bool = False
    """Whether the layer before names the experts."""
    skipped: bool = False
    """Whether a share `setting.zeros` of the neurons is left out."""
    low_share: float = LOW_SHARE
    """The share of a layer's experts in 2 bits, if `bits` is `MIXED`."""
    most_used: bool = False
    """Whether these are the experts that calibration text uses most, not those that it uses least."""

    @contextmanager
    def change(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """There are no facts. Raises `UserError` for a model without experts."""
        model = loaded(settings.model)[0]
        weights, theta = _matrices(model), limits(self.setting) if self.skipped else None
        wanted = {
            "experts": self._by_usage() if self.bits == MIXED else self.bits,
            "attention": self.attention,
        }
        fewer = [part for part, bits in wanted.items() if bits != HALF]
        with restored([weight for part in fewer for weight in weights[part]]):
            for part in fewer:
                _round(weights[part], wanted[part])
            with as_predicted(model, self.foretold, theta):
                yield {}

    def _by_usage(self) -> list[int]:
        """The bits of each of the experts' weights, in the order of `_matrices`."""
        found, sign = samples(self.setting, "calibration"), -1 if self.most_used else 1
        usage = [sign * found.active(layer).double().mean(0).numpy() for layer in range(found.layers)]
        return [bits for of_layer in bits_by_usage(usage, self.low_share) for _ in ("up", "down") for bits in of_layer]


def expert_variants(setting: RoutedModel, names: Sequence[str]) -> dict[str, ExpertVariant]:
    """Alterations by their names in `VARIANTS`."""
    return {name: ExpertVariant(setting, *VARIANTS[name]) for name in names}


def _matrices(model: nn.Module) -> dict[str, list[Tensor]]:
    """The weights of experts, gate and up or down of each, and the other linears of the decoder's blocks."""
    experts = [each.linears for each in mixtures(model)]
    of_experts = [it.weight.data for of in experts for kind in ("up", "down") for it in (getattr(e, kind) for e in of)]
    inside = {module for each in experts for module in each.modules()}
    linears = [it for block in decoder_blocks(model) for it in block.modules() if isinstance(it, nn.Linear)]
    others = [linear.weight.data for linear in linears if linear not in inside]
    return {"experts": of_experts, "attention": others}


def _round(weights: Sequence[Tensor], bits: int | Sequence[int]) -> None:
    """Round weights in place to the nearest of the levels of their groups, as `RoundToNearest` has them.

    `bits` are of all weights, or of each.
    """
    each = [bits] * len(weights) if isinstance(bits, int) else bits
    for weight, number in zip(weights, each, strict=True):
        groups = weight.reshape(-1, GROUPS[number])  # a view, or a copy of a weight whose rows are apart
        for part in groups.split(AT_ONCE // GROUPS[number]):
            numbers = part.float()
            part.copy_(rounded(numbers, *levels(numbers, number), number))
        weight.copy_(groups.view_as(weight))
