"""A dense FFN split into experts, and routers and adapters trained so that some experts give the dense probabilities.

The form is DeepSeekMoE's (Dai et al., 2024). As in CMoE (Pei et al., 2025), the neurons that most tokens use are
shared, the others are clustered by the tokens that use them, in clusters of one size, and a router is fitted: here a
linear one, by ridge regression. The magnitude of a neuron is |act(gate) · up| times the norm of its column of `down`.

The loss of the training is the one of `toolkit.recovery.distillation`. While it trains, the model stays dense and the
neurons of the experts that a token does not use are set to zero. The choice of experts has no gradient of its own:
routers get that of a sigmoid of the score's distance from the lowest chosen one (a straight-through estimator: Bengio
et al., 2013).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.activation import activation, activation_name
from toolkit.models.adapters import Adapters, LowRankDifference
from toolkit.models.cutting import attached
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.models.mixture import FILE, SplitParts, check_gated, save
from toolkit.progress import progress
from toolkit.quality import perplexity
from toolkit.recovery import card
from toolkit.recovery.distillation import adapted, distil, fresh
from toolkit.recovery.training import Training, place
from toolkit.sparsity.calibration import Calibration
from toolkit.sparsity.thresholds import run_decoder

FITTED_ON = Calibration(windows=8, sequence_length=512)  # windows that neurons are sorted and routers fitted on
SEQUENCE_LENGTH = 1024  # tokens of a window of the evaluation
TOP = 0.25  # a token uses this share of a layer's neurons: those with the highest magnitudes
ROUNDS = 6  # of clustering
FEATURES = 256  # random directions that the tokens' magnitudes are projected on
RIDGE = 0.1  # of the mean square of the router's inputs
LOSS = "distillation of routers and differences from the dense model's probabilities"
ABOUT = """\
`{model}` with each FFN split into experts, in DeepSeekMoE's form: {shared} neurons that every token uses, and
{experts} routed experts of {neurons} neurons, {per_token} of which a token uses. `load_model("{name}")` loads
`{model}`, adds low-rank differences to its decoder linears and puts its neurons in the order of `{file}`. The class
stays the model's own; the config's entry `split_mixture` says how it is split. An expert's output has a weight of 1,
so without the differences all experts together are the dense FFN.

"fitted": split and router by what the neurons give on calibration text, no training. "random clusters": the same
shared neurons and a router fitted in the same way, the other neurons in random groups. "random router": the fitted
groups, routed at random. "distilled": this model."""


@dataclass(frozen=True)
class Sizes:
    """How an FFN is split: routed experts, how many of them a token uses, and the neurons that every token uses."""

    experts: int = 14
    per_token: int = 8
    shared: int = 192


@dataclass(frozen=True)
class Splitting:
    """How a model is split and trained afterwards."""

    model: str
    sizes: Sizes = field(default_factory=Sizes)
    rank: int = 24
    """Rank of the difference of each decoder linear but the down projections."""
    down_rank: int = 48
    corpus: str = "wiki-slice"
    training: Training = field(default_factory=Training)

    def names(self) -> list[str]:
        """The name of the model that is made."""
        return [f"{Path(self.model).name}-moe-split"]


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
            run_decoder(model, window)
    return [torch.cat(found) for found in inputs]


def split_parts(
    model: nn.Module, windows: Int64[Tensor, "windows tokens"], sizes: Sizes, at_random: bool = False
) -> SplitParts:
    """The parts that split a dense model, from text. Raises `UserError` unless its FFNs are shared out evenly."""
    ffns, act, splits = decoder_ffns(model), activation(activation_name(model)), []
    check_gated(ffns)
    if rest := (ffns[0].neurons - sizes.shared) % sizes.experts:
        raise UserError(f"{ffns[0].neurons} neurons less {sizes.shared}: {sizes.experts} experts leave {rest}")
    inputs = ffn_inputs(model, windows)
    with progress("splitting FFNs", len(inputs), "layers") as bar:
        for ffn, x in zip(ffns, inputs, strict=True):
            splits.append(split_ffn(ffn, act, x, sizes, at_random))
            bar.update()
    orders, routers = map(torch.stack, zip(*splits, strict=True))
    return SplitParts(orders, routers, sizes.shared, sizes.per_token)


@torch.no_grad()
def split_ffn(
    ffn: FFN,
    act: Callable[[Tensor], Tensor],
    x: Float[Tensor, "tokens hidden"],
    sizes: Sizes,
    at_random: bool = False,
) -> tuple[Int64[Tensor, " neurons"], Float[Tensor, "experts hidden"]]:
    """One gated FFN's neurons in their new order, the shared ones first, and its router, from what they give on text.

    `at_random` is the rival: the same shared neurons and a router fitted in the same way, the others in random groups.
    """
    found = magnitudes(ffn, act, x)
    order = usage(found).argsort(descending=True, stable=True)
    shared, routed = order[: sizes.shared], order[sizes.shared :]
    if at_random:
        mixed = routed[torch.randperm(len(routed), generator=torch.Generator().manual_seed(0))]
        groups = list(mixed.view(sizes.experts, -1).sort(1).values)
    else:
        labels = balanced_clusters(features(found[:, routed]), sizes.experts)
        groups = [routed[labels == expert].sort().values for expert in range(sizes.experts)]
    return torch.cat([shared.sort().values, *groups]), fitted_router(x, found, groups)


@torch.no_grad()
def magnitudes(ffn: FFN, act: Callable[[Tensor], Tensor], x: Float[Tensor, "tokens hidden"]) -> Tensor:
    """|act(gate · x) · (up · x)| times the norm of the neuron's column of `down`: float32 [tokens, neurons]."""
    outputs = act(functional.linear(x, ffn.gate.weight)) * functional.linear(x, ffn.up.weight)
    return outputs.float().abs() * ffn.down.weight.float().norm(dim=0)


def usage(found: Float[Tensor, "tokens neurons"]) -> Float[Tensor, " neurons"]:
    """The share of tokens that use each neuron: it is among the `TOP` of the layer's."""
    count = max(1, round(TOP * found.shape[1]))
    floor = found.kthvalue(found.shape[1] - count + 1, dim=1, keepdim=True).values
    return (found >= floor).float().mean(0)


def features(found: Float[Tensor, "tokens neurons"]) -> Float[Tensor, "neurons features"]:
    """A row of length 1 for each neuron: its magnitudes by token, less their mean, in random directions."""
    rows = functional.normalize((found - found.mean(0)).T, dim=1)
    directions = torch.randn(rows.shape[1], FEATURES, generator=torch.Generator().manual_seed(0))
    return functional.normalize(rows @ directions, dim=1)


def balanced_clusters(rows: Float[Tensor, "items features"], count: int) -> Int64[Tensor, " items"]:
    """The cluster of each row, all of one size: k-means whose assignment is the best one of that kind."""
    from scipy.optimize import linear_sum_assignment

    centres = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]]
    labels = torch.zeros(len(rows), dtype=torch.int64)
    for _ in range(ROUNDS):
        likeness = (rows @ centres.T).repeat_interleave(len(rows) // count, dim=1)
        items, places = linear_sum_assignment(likeness.numpy(), maximize=True)
        labels[torch.from_numpy(items)] = torch.from_numpy(places) // (len(rows) // count)
        sums = torch.zeros(count, rows.shape[1]).index_add(0, labels, rows)
        centres = functional.normalize(sums, dim=1)
    return labels


def fitted_router(
    x: Float[Tensor, "tokens hidden"], found: Float[Tensor, "tokens neurons"], groups: Sequence[Tensor]
) -> Float[Tensor, "experts hidden"]:
    """A linear map from the FFN's input to the logarithm of each expert's energy, by ridge regression.

    The energy is the sum of squared magnitudes; each token's mean over the experts is taken out, because only the order
    of a token's experts matters. The logarithm gives every token the same weight. The scores on `x` have a standard
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


def distilled(
    recipe: Splitting, model: nn.Module, tokens: Int64[Tensor, " n"], parts: SplitParts
) -> tuple[SplitParts, list[dict[str, float]]]:
    """Train routers and differences of the parts of a dense model; and the curve of losses (nats a token).

    The state is kept on the way; the same call goes on with it. Raises `UserError` as `distil` does.
    """
    routers = [router.clone().requires_grad_() for router in parts.router]

    @contextmanager
    def student(lows) -> Iterator[None]:
        with adapted(model, Adapters(lows, torch.zeros(len(routers)))), masked(model, parts, routers):
            yield

    start, state = fresh(model, recipe.rank, recipe.down_rank), place(recipe, model, [tokens]) / "split.safetensors"
    named = {f"router.{layer}": router for layer, router in enumerate(routers)}
    lows, curve = distil(model, tokens, student, start, recipe.training, state, named)
    held = lambda tensor: tensor.detach().bfloat16().float()  # noqa: E731 (as a file holds it)
    differences = {name: LowRankDifference(*map(held, low)) for name, low in lows.items()}
    return replace(parts, router=held(torch.stack(routers)), differences=differences), curve


@contextmanager
def masked(model: nn.Module, parts: SplitParts, routers: Sequence[Tensor] | Tensor) -> Iterator[None]:
    """Inside the block, the neurons of a dense model's FFNs are zero where their expert is not used."""
    handles = []
    for ffn, order, router in zip(decoder_ffns(model), parts.permutation, routers, strict=True):
        mask = _Mask(order, router, parts)
        handles += [ffn.up.register_forward_pre_hook(mask.read), ffn.down.register_forward_pre_hook(mask.cut)]
    with attached(handles):
        yield


class _Mask:
    """One layer's choice of experts, from the FFN's input to its neurons' outputs."""

    def __init__(self, order: Tensor, router: Tensor, parts: SplitParts):
        self.router, self.per_token, routed = router, parts.per_token, order[parts.shared :]
        self.group = torch.full_like(order, len(router))  # of each neuron; the last group is always on
        self.group[routed] = torch.arange(len(router)).repeat_interleave(len(routed) // len(router))
        self.on: Float[Tensor, "... groups"] | None = None

    def read(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        scores = functional.linear(args[0].to(self.router.dtype), self.router)
        lowest = scores.topk(self.per_token, dim=-1).values[..., -1:]
        soft = (scores - lowest).sigmoid()
        on = (scores >= lowest).to(scores.dtype) + soft - soft.detach()
        self.on = functional.pad(on, (0, 1), value=1.0)

    def cut(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        return (args[0] * self.on.to(args[0].dtype)[..., self.group],)


def quality(
    model: nn.Module, versions: Mapping[str, SplitParts], tokens: Int64[Tensor, " n"], windows: int
) -> pd.DataFrame:
    """Perplexity of a dense model, and of versions of it that are split, on the first windows of a text.

    Columns: version, experts_active (routed experts that a token uses: every other number from 4, and all), perplexity,
    relative (to the dense model's).
    """
    dense = float(perplexity(model, tokens, SEQUENCE_LENGTH, windows))
    rows: list[tuple[str, int | None, float]] = [("dense", None, dense)]
    for name, parts in versions.items():
        experts, adapters = parts.router.shape[1], Adapters(parts.differences, torch.zeros(len(parts.router)))
        for count in sorted({*range(min(4, experts), experts, 2), experts}):
            with adapted(model, adapters), masked(model, replace(parts, per_token=count), parts.router):
                rows.append((name, count, float(perplexity(model, tokens, SEQUENCE_LENGTH, windows))))
    table = pd.DataFrame(rows, columns=["version", "experts_active", "perplexity"]).astype({"experts_active": "Int64"})
    return table.assign(relative=table["perplexity"] / dense)


def make(recipe: Splitting, out: Path, model: nn.Module, texts: Sequence[Int64[Tensor, " n"]], windows: int) -> None:
    """Split a model into experts, distil them, evaluate the mixture and write its folder in `out`.

    `texts` are calibration and evaluation tokens. Raises `UserError` as `split_parts` and `card.write` do.
    """
    (tokens, evaluation), folder, sizes = texts, out / recipe.names()[0], recipe.sizes
    drawn = FITTED_ON.draw(tokens)
    fitted, shuffled = (split_parts(model, drawn, sizes, at_random) for at_random in (False, True))
    parts, curve = distilled(recipe, model, tokens, fitted)
    router = torch.randn(fitted.router.shape, generator=torch.Generator().manual_seed(0))
    rivals = {"random clusters": shuffled, "random router": replace(fitted, router=router)}
    tables = {"quality.csv": quality(model, {"fitted": fitted, **rivals, "distilled": parts}, evaluation, windows)}
    neurons = (parts.permutation.shape[1] - sizes.shared) // sizes.experts
    about = ABOUT.format(name=folder.name, model=recipe.model, file=FILE, neurons=neurons, **asdict(sizes))
    save_parts = partial(save, base=model, parts=parts)
    card.write(folder, about, LOSS, "split", asdict(recipe), curve, FILE, save_parts, tables, windows)
