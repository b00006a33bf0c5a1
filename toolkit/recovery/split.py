"""Routers and adapters trained so that a split model, with some of its experts, gives its dense model's probabilities.

The loss is the one of `toolkit.recovery.distillation`. While it trains, the model stays dense and the neurons of the
experts that a token does not use are set to zero. The choice of experts has no gradient of its own: routers get that of
a sigmoid of the score's distance from the lowest chosen one (a straight-through estimator: Bengio et al., 2013).
"""

import json
from collections.abc import Iterator
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

from toolkit.cache import shelf
from toolkit.models.activation import activation, activation_name
from toolkit.models.adapters import Adapters, LowRankDifference, fingerprint
from toolkit.models.cutting import attached
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.models.split_files import FILE, SplitParts, save
from toolkit.models.splitting import Sizes, ffn_inputs, random_split, split_ffn
from toolkit.progress import progress
from toolkit.quality import perplexity
from toolkit.recovery import card
from toolkit.recovery.distillation import adapted, backward_divergence, fresh, sides_of
from toolkit.recovery.training import Training, train
from toolkit.sparsity.calibration import Calibration

FITTED_ON = Calibration(windows=8, sequence_length=512)  # windows that neurons are sorted and routers fitted on
SEQUENCE_LENGTH = 1024  # tokens of a window of the evaluation
ABOUT = """\
`{model}` with each FFN split into experts, in DeepSeekMoE's form: {shared} neurons that every token uses, and
{experts} routed experts of {neurons} neurons, {per_token} of which a token uses. `load_model("{name}")` loads
`{model}`, adds low-rank differences to its decoder linears and puts its neurons in the order of `{file}`. The class
stays `LlamaForCausalLM`; the config's entry `split_mixture` says how it is split. An expert's output has a weight of 1,
so without the differences all experts together are the dense FFN.

{table}

Perplexity is measured on {windows} windows of 1024 tokens of evaluation text. "fitted": split and router by what the
neurons give on calibration text, no training. "random clusters": the same shared neurons and a router fitted in the
same way, the other neurons in random groups. "random router": the fitted groups, routed at random. "distilled": this
model.

* **Split**: `toolkit.models.splitting`. The neurons that most tokens use are shared, the others clustered by the tokens
  that use them (balanced assignment), and a linear router is fitted to the experts' energy by ridge regression.
"""


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


def split_parts(model: nn.Module, windows: Int64[Tensor, "windows tokens"], sizes: Sizes, make=split_ffn) -> SplitParts:
    """The parts that split a dense model, from text; `make` is `split_ffn` or a rival of it."""
    act, splits = activation(activation_name(model)), []
    inputs = ffn_inputs(model, windows)
    with progress("splitting FFNs", len(inputs), "layers") as bar:
        for ffn, x in zip(decoder_ffns(model), inputs, strict=True):
            splits.append(make(ffn, act, x, sizes))
            bar.update()
    orders, routers = (torch.stack([getattr(it, name) for it in splits]) for name in ("permutation", "router"))
    return SplitParts(orders, routers, sizes.shared, sizes.per_token)


def distilled(
    recipe: Splitting, model: nn.Module, tokens: Int64[Tensor, " n"], parts: SplitParts
) -> tuple[SplitParts, list[dict[str, float]]]:
    """Train routers and differences of the parts of a dense model; and the curve of losses (nats a token).

    The state is kept on the way; the same call goes on with it. Raises `UserError` as `train` does.
    """
    start = fresh(model, recipe.rank, recipe.down_rank).differences
    lows = {
        name: LowRankDifference(low.left.requires_grad_(), low.right.requires_grad_()) for name, low in start.items()
    }
    adapters = Adapters(lows, torch.zeros(len(decoder_ffns(model))))
    routers = [router.clone().requires_grad_() for router in parts.router]

    def gradients(windows: Int64[Tensor, "batch tokens"]) -> float:
        total = 0.0
        for window in windows:
            with torch.no_grad():
                teacher = model.base_model(window[None], use_cache=False)[0]
            with adapted(model, adapters), masked(model, parts, routers):
                student = model.base_model(window[None], use_cache=False)[0]
            total += backward_divergence(model.get_output_embeddings(), student, teacher, len(windows))
        return total

    parameters = sides_of(lows) | {f"router.{layer}": router for layer, router in enumerate(routers)}
    place = shelf("recovery", asdict(recipe) | {"base": fingerprint(model), "tokens": len(tokens)})
    windows, state = partial(recipe.training.windows, tokens), place / "split.safetensors"
    curve = train("distilling", recipe.training, parameters, gradients, windows, state, asdict(recipe))
    held = lambda tensor: tensor.detach().bfloat16().float()  # noqa: E731 (as a file holds it)
    differences = {name: LowRankDifference(held(low.left), held(low.right)) for name, low in lows.items()}
    return replace(parts, router=held(torch.stack(routers)), differences=differences), curve


@contextmanager
def masked(model: nn.Module, parts: SplitParts, routers: list[Tensor] | Tensor) -> Iterator[None]:
    """Inside the block, the neurons of a dense model's FFNs are zero where their expert is not used."""
    places = zip(decoder_ffns(model), parts.permutation, routers, strict=True)
    masks = [_Mask(ffn, order, router, parts) for ffn, order, router in places]
    handles = [handle for mask in masks for handle in mask.hooked()]
    with attached(handles):
        yield


class _Mask:
    """One layer's choice of experts, from the FFN's input to its neurons' outputs."""

    def __init__(self, ffn: FFN, order: Tensor, router: Tensor, parts: SplitParts):
        self.ffn, self.router, self.per_token = ffn, router, parts.per_token
        experts = len(router)
        self.group = torch.full((ffn.neurons,), experts)  # of each neuron; the last group is always on
        self.group[order[parts.shared :]] = torch.arange(experts).repeat_interleave(
            (ffn.neurons - parts.shared) // experts
        )
        self.on: Float[Tensor, "... groups"] | None = None

    def hooked(self):
        """The hooks that read the input and cut the outputs."""
        return self.ffn.up.register_forward_pre_hook(self._read), self.ffn.down.register_forward_pre_hook(self._cut)

    def _read(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        scores = functional.linear(args[0].to(self.router.dtype), self.router)
        lowest = scores.topk(self.per_token, dim=-1).values[..., -1:]
        soft = (scores - lowest).sigmoid()
        on = (scores >= lowest).to(scores.dtype) + soft - soft.detach()
        self.on = functional.pad(on, (0, 1), value=1.0)

    def _cut(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        return (args[0] * self.on.to(args[0].dtype)[..., self.group],)


def quality(
    model: nn.Module,
    windows: Int64[Tensor, "windows tokens"],
    evaluation: Int64[Tensor, " n"],
    fitted: SplitParts,
    trained: SplitParts,
    sizes: Sizes,
    limit: int,
) -> pd.DataFrame:
    """Perplexity of a dense model, and of it split: fitted, with random groups, with a random router, distilled.

    Args:
        windows: calibration text, for the random groups' router.
        evaluation: text of which `limit` windows are taken.

    Columns: version, experts_active (routed experts that a token uses: every other number from 4, and all), perplexity,
    relative (to the dense model's).
    """
    router = torch.randn(fitted.router.shape, generator=torch.Generator().manual_seed(0))
    counts = sorted({*range(min(4, sizes.experts), sizes.experts, 2), sizes.experts})
    versions = {
        "fitted": (fitted, counts),
        "random clusters": (split_parts(model, windows, sizes, random_split), counts),
        "random router": (replace(fitted, router=router), [sizes.per_token]),
        "distilled": (trained, counts),
    }
    dense = float(perplexity(model, evaluation, SEQUENCE_LENGTH, limit))
    rows: list[dict[str, object]] = [{"version": "dense", "experts_active": None, "perplexity": dense}]
    for name, (parts, active) in versions.items():
        adapters = Adapters(parts.differences, torch.zeros(len(parts.router)))
        for count in active:
            with adapted(model, adapters), masked(model, replace(parts, per_token=count), parts.router):
                value = float(perplexity(model, evaluation, SEQUENCE_LENGTH, limit))
            rows.append({"version": name, "experts_active": count, "perplexity": value})
    table = pd.DataFrame(rows).astype({"experts_active": "Int64"})
    return table.assign(relative=table["perplexity"] / dense)


def write(
    folder: Path,
    base: nn.Module,
    recipe: Splitting,
    parts: SplitParts,
    curve: list[dict[str, float]],
    quality: pd.DataFrame,
    windows: int,
) -> None:
    """Write a new folder of a split model. Raises `UserError` if it exists, and for trouble with the disk."""
    sizes, record = recipe.sizes, asdict(recipe)
    about = ABOUT.format(
        name=folder.name,
        model=recipe.model,
        file=FILE,
        neurons=(parts.permutation.shape[1] - sizes.shared) // sizes.experts,
        table=card.markdown(quality),
        windows=windows,
        **asdict(sizes),
    )
    of = "distillation of routers and differences from the dense model's probabilities"
    notes = card.training_notes(of, "split", record, curve)
    weights = partial(save, base=base, parts=parts, about={"model": recipe.model, "recipe": json.dumps(record)})
    card.write(folder, about, notes, curve, FILE, weights, {"quality.csv": quality})
