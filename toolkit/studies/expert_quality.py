"""What fewer bits, foretold experts and skipped neurons cost a mixture of experts (CORM, tables 1 and 2).

    quality_table(RoutedModel("smollm2-135m-moe-upcycled"))

With `as_predicted`, a model goes on with what the layer before foretells (section 4.2): its input through this layer's
gate names the experts, and through their W1 the neurons whose |act(W1 · x)| exceeds θ. The first mixture is exact.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.nn import functional

from toolkit.activations.routing import mixtures
from toolkit.cache import kept
from toolkit.errors import unknown
from toolkit.evaluation.likelihood import paired_difference, perplexity
from toolkit.models.activation import activation, activation_name
from toolkit.models.blocks import decoder_blocks
from toolkit.models.cutting import attached
from toolkit.models.experts import Experts, SharedFFN
from toolkit.policies.expert_bits import bits_by_usage
from toolkit.predictors.next_layer import predict_experts
from toolkit.quantization.groups import encode, levels
from toolkit.studies.routing import RoutedModel, limits, samples
from toolkit.studies.thresholded import LOADING, loaded, weights_key
from toolkit.text import load_tokens

GROUPS = {4: 64, 2: 16}  # weights that share a scale (CORM, appendix)
HALF = 16
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
    """Inside the block, mixtures compute with what the layer before foretells.

    Args:
        experts: the experts, and with `thresholds` their neurons, are foretold; else they are the layer's own.
        thresholds: θ of each mixture; None: no neuron is skipped.

    Raises `UserError` for a model without experts.
    """
    found, seen = mixtures(model), {}

    def compute(number: int, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = args[0].reshape(-1, args[0].shape[-1])
        before = seen[number - 1] if experts and number else x
        seen[number] = x
        limit = None if thresholds is None else float(thresholds[number])
        return mixture_output(found[number], x, before, activation_name(model), limit).to(output.dtype).view_as(output)

    with attached(each.module.register_forward_hook(partial(compute, n)) for n, each in enumerate(found)):
        yield


@torch.no_grad()
def mixture_output(
    experts: Experts,
    x: Float[Tensor, "tokens hidden"],
    before: Float[Tensor, "tokens hidden"],
    act: str,
    limit: float | None = None,
) -> Float32[Tensor, "tokens hidden"]:
    """What a mixture gives for `x` with the experts, and over a limit the neurons, that `before` names.

    The weights are those that the router gives these experts for `x`.
    """
    ids = predict_experts(before, experts)
    weights, total = experts.weigh(experts.scores(x), ids), _shared_output(experts.shared, x, act)
    for expert in ids.unique().tolist():
        tokens, ranks = torch.where(ids == expert)
        gate, up, down = experts.matrices(expert)
        inner = activation(act)(functional.linear(x[tokens], gate)) * functional.linear(x[tokens], up)
        if limit is not None:
            inner *= activation(act)(functional.linear(before[tokens], gate)).float().abs() > limit
        total.index_add_(0, tokens, (inner @ down).float() * weights[tokens, ranks, None])
    return total


@kept("expert_quality", without=LOADING, key=weights_key)
def quality_table(setting: RoutedModel, variants: tuple[str, ...] = tuple(VARIANTS)) -> pd.DataFrame:
    """A row for each variant: the perplexity of a model's evaluation text.

    Bits are rounded to nearest, in groups of `GROUPS`. Columns: model, variant, perplexity, relative (to 16 bits),
    log_difference (mean over windows) and difference_error (its standard error); evidence, profile. Raises `UserError`
    for an unknown variant, or a model without experts.
    """
    if unknown_ones := [name for name in variants if name not in VARIANTS]:
        raise unknown("variant", unknown_ones[0], VARIANTS)
    model, tokenizer, _ = loaded(setting.model)
    tokens = load_tokens(setting.corpus, tokenizer, "evaluation")
    theta = limits(setting) if any(VARIANTS[name][3] for name in variants) else None
    found, weights = {}, _matrices(model)
    dense = {name: [each.clone() for each in group] for name, group in weights.items()}
    try:
        now: dict[str, int | str] = {"experts": HALF, "attention": HALF}
        for name in dict.fromkeys(("16 bits", *variants)):
            bits, attention_bits, foretold, skipped = VARIANTS[name]
            for part, wanted in {"experts": bits, "attention": attention_bits}.items():
                if wanted != now[part]:
                    _round(weights[part], dense[part], _by_usage(setting) if wanted == MIXED else wanted)
                    now[part] = wanted
            with as_predicted(model, foretold, theta if skipped else None):
                found[name] = perplexity(model, tokens, setting.sequence_length, setting.windows)
    finally:
        for part, group in weights.items():
            _round(group, dense[part], HALF)
    own, rows = found["16 bits"], []
    for name, each in found.items():
        difference, error = paired_difference(each.window_nll, own.window_nll)
        row = {"variant": name, "perplexity": float(each), "relative": float(each) / float(own)}
        rows.append(row | {"log_difference": difference, "difference_error": error})
    return pd.DataFrame(rows).assign(model=setting.model, evidence="measured", profile="this-machine")


def _matrices(model: nn.Module) -> dict[str, list[Tensor]]:
    """The weights of experts, gate and up or down of each, and the other linears of the decoder's blocks."""
    found = mixtures(model)
    of_experts = [weight for each in found for fused in (each.gate_up, each.down) for weight in fused]
    routers = {each.router.data_ptr() for each in found}
    linears = [each for block in decoder_blocks(model) for each in block.modules() if isinstance(each, nn.Linear)]
    others = [each.weight.data for each in linears if each.weight.data_ptr() not in routers]
    return {"experts": of_experts, "attention": others}


def _by_usage(setting: RoutedModel) -> list[int]:
    """The bits of each of the experts' weights, in the order of `_matrices`."""
    found = samples(setting, "calibration")
    usage = [found.active(layer).double().mean(0).numpy() for layer in range(found.layers)]
    return [bits for of_layer in bits_by_usage(usage, LOW_SHARE) for _ in ("gate_up", "down") for bits in of_layer]


def _round(weights: Sequence[Tensor], dense: Sequence[Tensor], bits: int | Sequence[int]) -> None:
    """Write the dense weights in place, each the nearest of the levels of its group, as `RoundToNearest` has them.

    `bits` are of all weights, or of each.
    """
    each = [bits] * len(weights) if isinstance(bits, int) else bits
    for weight, original, bits in zip(weights, dense, each, strict=True):
        if bits == HALF:
            weight.copy_(original)
            continue
        groups = original.reshape(-1, GROUPS[bits]).float()
        scale, zero = levels(groups, bits)
        codes = encode(groups, scale, zero, bits)
        weight.copy_(((codes - zero.float()) * scale.float()).view_as(weight))


def _shared_output(
    shared: SharedFFN | None, x: Float[Tensor, "tokens hidden"], act: str
) -> Float32[Tensor, "tokens hidden"]:
    """What the FFN gives that every token uses; zeros without one."""
    if shared is None:
        return torch.zeros(x.shape, dtype=torch.float32)
    inner = activation(act)(functional.linear(x, shared.gate)) * functional.linear(x, shared.up)
    output = functional.linear(inner, shared.down).float()
    return output if shared.share is None else output * torch.sigmoid(functional.linear(x, shared.share).float())
