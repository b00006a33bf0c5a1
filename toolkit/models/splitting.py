"""Where a dense FFN is split into experts, without training: which neurons are shared, which go together, the router.

    inputs = ffn_inputs(model, windows)
    parts = [split_ffn(ffn, act, x, Sizes()) for ffn, x in zip(decoder_ffns(model), inputs)]

The form is DeepSeekMoE's (Dai et al., 2024). As in CMoE (Pei et al., 2025), the neurons that most tokens use are
shared, the others are clustered by the tokens that use them, in clusters of one size, and a router is fitted, here a
linear one by ridge regression. The magnitude of a neuron is |act(gate) · up| times the norm of its column of `down`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.cutting import attached
from toolkit.models.ffn import FFN, decoder_ffns

TOP = 0.25  # a token uses this share of a layer's neurons: those with the highest magnitudes
ROUNDS = 6  # of clustering
FEATURES = 256  # random directions that the tokens' magnitudes are projected on
RIDGE = 0.1  # of the mean square of the router's inputs


@dataclass(frozen=True)
class Sizes:
    """How an FFN is split: routed experts, how many of them a token uses, and the neurons that every token uses."""

    experts: int = 14
    per_token: int = 8
    shared: int = 192

    def neurons(self, total: int) -> int:
        """The neurons of a routed expert. Raises `UserError` if the experts are not of one size."""
        each, rest = divmod(total - self.shared, self.experts)
        if rest or each < 1:
            raise UserError(f"{total} neurons less {self.shared} shared ones are not split into {self.experts} experts")
        return each


@dataclass(frozen=True, eq=False)
class Split:
    """How one FFN is split: its neurons in their new order, the shared ones first, and a router row for each expert."""

    permutation: Int64[Tensor, " neurons"]
    router: Float[Tensor, "experts hidden"]


@torch.no_grad()
def ffn_inputs(model: nn.Module, windows: Int64[Tensor, "windows tokens"]) -> list[Float[Tensor, "tokens hidden"]]:
    """The inputs of each layer's FFN on the windows of a text, in the model's dtype."""
    inputs: list[list[Tensor]] = [[] for _ in decoder_ffns(model)]
    hooks = (
        ffn.up.register_forward_pre_hook(lambda _, args, found=found: found.append(args[0].flatten(0, -2)))
        for ffn, found in zip(decoder_ffns(model), inputs, strict=True)
    )
    with attached(hooks):
        for window in windows:
            model.base_model(window[None].to(model.device), use_cache=False)
    return [torch.cat(found) for found in inputs]


@torch.no_grad()
def magnitudes(ffn: FFN, act: Callable[[Tensor], Tensor], x: Float[Tensor, "tokens hidden"]) -> Tensor:
    """|act(gate · x) · (up · x)| times the norm of the neuron's column of `down`: float32 [tokens, neurons]."""
    outputs = act(functional.linear(x, ffn.gate.weight)) * functional.linear(x, ffn.up.weight)
    return outputs.float().abs() * ffn.down.weight.float().norm(dim=0)


def split_ffn(
    ffn: FFN, act: Callable[[Tensor], Tensor], x: Float[Tensor, "tokens hidden"], sizes: Sizes, seed: int = 0
) -> Split:
    """Split one gated FFN by what its neurons give on text."""
    sizes.neurons(ffn.neurons)
    found = magnitudes(ffn, act, x)
    order = usage(found).argsort(descending=True, stable=True)
    shared, routed = order[: sizes.shared], order[sizes.shared :]
    labels = balanced_clusters(features(found[:, routed], seed), sizes.experts, seed)
    groups = [routed[labels == expert].sort().values for expert in range(sizes.experts)]
    return Split(torch.cat([shared.sort().values, *groups]), fitted_router(x, found, groups))


def random_split(
    ffn: FFN, act: Callable[[Tensor], Tensor], x: Float[Tensor, "tokens hidden"], sizes: Sizes, seed: int = 0
) -> Split:
    """The same shared neurons and a router fitted in the same way, but the other neurons at random: the rival."""
    found = magnitudes(ffn, act, x)
    order = usage(found).argsort(descending=True, stable=True)
    shared, routed = order[: sizes.shared], order[sizes.shared :]
    mixed = routed[torch.randperm(len(routed), generator=torch.Generator().manual_seed(seed))]
    groups = list(mixed.view(sizes.experts, sizes.neurons(ffn.neurons)).sort(1).values)
    return Split(torch.cat([shared.sort().values, *groups]), fitted_router(x, found, groups))


def usage(found: Float[Tensor, "tokens neurons"]) -> Float[Tensor, " neurons"]:
    """The share of tokens that use each neuron: it is among the `TOP` of the layer's."""
    count = max(1, round(TOP * found.shape[1]))
    floor = found.kthvalue(found.shape[1] - count + 1, dim=1, keepdim=True).values
    return (found >= floor).float().mean(0)


def features(found: Float[Tensor, "tokens neurons"], seed: int = 0) -> Float[Tensor, "neurons features"]:
    """A row of length 1 for each neuron: its magnitudes by token, less their mean, in random directions."""
    rows = functional.normalize((found - found.mean(0)).T, dim=1)
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(rows.shape[1], FEATURES, generator=generator)
    return functional.normalize(rows @ directions, dim=1)


def balanced_clusters(rows: Float[Tensor, "items features"], count: int, seed: int = 0) -> Int64[Tensor, " items"]:
    """The cluster of each row, all of one size: k-means whose assignment is the best one of that kind.

    Raises `UserError` unless the rows are a multiple of `count`, or without SciPy.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise UserError("clusters of one size need SciPy: pip install scipy") from error
    if len(rows) % count:
        raise UserError(f"{len(rows)} rows are not {count} clusters of one size")
    generator = torch.Generator().manual_seed(seed)
    centres = rows[torch.randperm(len(rows), generator=generator)[:count]]
    labels = torch.zeros(len(rows), dtype=torch.int64)
    for _ in range(ROUNDS):
        likeness = (rows @ centres.T).repeat_interleave(len(rows) // count, dim=1)
        items, places = linear_sum_assignment(likeness.numpy(), maximize=True)
        labels[torch.from_numpy(items)] = torch.from_numpy(places) // (len(rows) // count)
        sums = torch.zeros(count, rows.shape[1]).index_add(0, labels, rows)
        centres = functional.normalize(sums, dim=1)
    return labels


def fitted_router(
    x: Float[Tensor, "tokens hidden"], found: Float[Tensor, "tokens neurons"], groups: list[Tensor]
) -> Float[Tensor, "experts hidden"]:
    """A linear map from the FFN's input to the logarithm of each expert's energy, by ridge regression.

    The energy is the sum of squared magnitudes; each token's mean over the experts is taken out, because only the order
    of a token's experts counts. The logarithm gives every token the same weight. The scores on `x` have a standard
    deviation of 1.
    """
    sums = torch.stack([found[:, group].square().sum(1) for group in groups], dim=1)
    energy = sums.clamp(min=torch.finfo(sums.dtype).tiny).log()
    energy = energy - energy.mean(1, keepdim=True)
    inputs = x.double()
    gram = inputs.T @ inputs
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    router = torch.linalg.solve(gram, inputs.T @ energy.double()).T
    return (router / (inputs @ router.T).std()).float()
