"""A dense Llama upcycled to a mixture of experts (Komatsuzaki et al., 2023), each expert a low-rank difference.

Every expert starts as the model's own FFN, so the mixture starts as the dense model. Differences (LoRA) and routers
then learn the next token on several texts at once, with the load-balance loss of the Switch Transformer (Fedus et al.,
2022). The products with the shared FFN are computed once a token, not once an expert.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.models.adapters import rounded
from toolkit.models.cutting import attached
from toolkit.models.experts import mixtures_by_layer, seen_routing
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.models.upcycled import FILE, as_mixtral, check_llama, save
from toolkit.quality import perplexity
from toolkit.recovery import card
from toolkit.recovery.training import Training, place, train
from toolkit.sparsity.thresholds import run_decoder

LOGITS_AT_ONCE = 128  # positions whose likelihoods are computed at a time
ROUNDS = 10  # of k-means
CENTRES_ON = 8  # windows of each text
SEQUENCE_LENGTH = 1024  # tokens of a window of the evaluation
PARTS = ("router", "gate_up_left", "gate_up_right", "down_left", "down_right")
LOSS = "next tokens of all texts and a load-balance loss"
ABOUT = """\
A Mixtral with {experts} experts, {per_token} of which a token uses, upcycled from `{model}`: each expert is its FFN and
a difference of rank {rank}. `load_model("{name}")` gives a `MixtralForCausalLM` with whole experts, so
that it costs what any Mixtral costs. `{file}` holds the routers and the differences. Since all experts share one FFN,
that FFN in memory and the differences on demand would make this model far cheaper to offload than its form suggests: it
stands for the form, not for the cost of independent experts.

The second table says how the routers share the tokens out, as means over the layers (`routing.csv` has every layer and
expert; entropies in bits, {even:.0f} if all experts are used evenly; `shared_load` is the overlap of the loads with
those on the first text)."""


@dataclass(frozen=True)
class Upcycling:
    """How a model is upcycled. A step takes `training.batch` sequences of each text."""

    model: str
    experts: int = 8
    per_token: int = 2
    rank: int = 8
    corpora: tuple[str, ...] = ("wiki-slice", "python-sources")
    balance: float = 0.05
    """Factor of the load-balance loss, which is 1 where all experts have the same load."""
    training: Training = field(default_factory=Training)

    def names(self) -> list[str]:
        """The name of the model that is made."""
        return [f"{Path(self.model).name}-moe-upcycled"]


@contextmanager
def mixed(model: nn.Module, parts: Mapping[str, Tensor], per_token: int) -> Iterator[list[Float[Tensor, ""]]]:
    """Inside the block, the model's FFNs are mixtures; gives the list that gets each one's load-balance loss."""
    balances: list[Tensor] = []
    ffns, layers = decoder_ffns(model), zip(*(parts[name].unbind(0) for name in PARTS), strict=True)
    try:
        for ffn, (router, *sides) in zip(ffns, layers, strict=True):
            ffn.module.forward = partial(_mixture, ffn, router, sides, per_token, balances)
        yield balances
    finally:
        for ffn in ffns:
            vars(ffn.module).pop("forward", None)


def _mixture(
    ffn: FFN, router: Tensor, sides: Sequence[Tensor], per_token: int, balances: list[Tensor], x: Tensor
) -> Float[Tensor, "batch tokens hidden"]:
    flat = x.flatten(0, 1)
    probabilities = functional.linear(flat.float(), router).softmax(-1)
    weights, ids = probabilities.topk(per_token, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
    balances.append(balance(probabilities, ids))
    gate, up = ffn.gate(flat), ffn.up(flat)
    neurons, low = torch.zeros_like(gate), torch.zeros_like(flat)
    lows = zip(*(side.to(x.dtype).unbind(0) for side in sides), strict=True)
    for expert, (gate_up_left, gate_up_right, down_left, down_right) in enumerate(lows):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        more_gate, more_up = (flat[tokens] @ gate_up_right.T @ gate_up_left.T).chunk(2, dim=-1)
        active = functional.silu(gate[tokens] + more_gate) * (up[tokens] + more_up) * weights[tokens, slots, None]
        neurons = neurons.index_add(0, tokens, active)
        low = low.index_add(0, tokens, active @ down_right.T @ down_left.T)
    return (ffn.down(neurons) + low).view_as(x)


def balance(probabilities: Float[Tensor, "tokens experts"], ids: Int64[Tensor, "tokens k"]) -> Float[Tensor, ""]:
    """Experts · Σ share of tokens · mean probability; 1 where the load is even."""
    experts = probabilities.shape[1]
    share = torch.bincount(ids.flatten(), minlength=experts) / ids.numel()
    return experts * (share * probabilities.mean(0)).sum()


def fresh(
    ffns: Sequence[FFN], recipe: Upcycling, routers: Sequence[Float[Tensor, "experts hidden"]]
) -> dict[str, Tensor]:
    """The parts of `toolkit.models.upcycled` with differences of zero, as LoRA starts: `right` random, `left` zero."""
    generator = torch.Generator().manual_seed(recipe.training.seed)
    layers, (count, rank) = [], (recipe.experts, recipe.rank)
    for ffn, router in zip(ffns, routers, strict=True):
        neurons, hidden = ffn.neurons, ffn.down.out_features
        gate_up_right = torch.randn(count, rank, hidden, generator=generator) / math.sqrt(hidden)
        down_right = torch.randn(count, rank, neurons, generator=generator) / math.sqrt(neurons)
        lefts = torch.zeros(count, 2 * neurons, rank), torch.zeros(count, hidden, rank)
        layers.append((router, lefts[0], gate_up_right, lefts[1], down_right))
    stacked = map(torch.stack, zip(*layers, strict=True))
    return {name: tensor.requires_grad_() for name, tensor in zip(PARTS, stacked, strict=True)}


def upcycle(
    recipe: Upcycling, model: nn.Module, texts: Sequence[Int64[Tensor, " n"]]
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Train the parts of a mixture on texts, one for each corpus, and round them as a file does; and the losses.

    The state is kept on the way; the same call goes on with it. Raises `UserError` for a model that is no Llama, a text
    that does not fill a sequence, and as `train` does.
    """
    check_llama(model)
    training, head = recipe.training, model.get_output_embeddings()
    parts = fresh(decoder_ffns(model), recipe, starting_routers(model, recipe, texts))

    def gradients(windows: Int64[Tensor, "batch tokens"]) -> float:
        """Add those of the mean negative log-likelihood, which is returned, and of the load-balance loss."""
        with mixed(model, parts, recipe.per_token) as balances:
            hidden = model.base_model(windows, use_cache=False)[0]
        rows, wanted, total = hidden[:, :-1].flatten(0, 1), windows[:, 1:].flatten(), 0.0
        leaf = rows.detach().requires_grad_()
        for part, target in zip(leaf.split(LOGITS_AT_ONCE), wanted.split(LOGITS_AT_ONCE), strict=True):
            loss = functional.cross_entropy(head(part).float(), target, reduction="sum") / len(wanted)
            loss.backward()
            total += loss.item()
        even = torch.stack(balances).mean() * recipe.balance
        torch.autograd.backward([rows, even], [leaf.grad, torch.ones_like(even)])
        return total

    windows = lambda step: torch.cat([training.windows(text, step) for text in texts])  # noqa: E731
    state = place(recipe, model, texts) / "upcycled.safetensors"
    curve = train("upcycling", training, parts, gradients, windows, state)
    return {name: rounded(it.detach()) for name, it in parts.items()}, curve


def starting_routers(model: nn.Module, recipe: Upcycling, texts: Sequence[Int64[Tensor, " n"]]) -> list[Tensor]:
    """For each layer the centres of clusters of its FFN's input, from some windows of each text.

    The mean of all inputs is taken out, and the scores are scaled to a standard deviation of 1.
    """
    windows = [recipe.training.windows(text, step)[0] for text in texts for step in range(CENTRES_ON)]
    generator = torch.Generator().manual_seed(recipe.training.seed)
    return [_centres(x.float(), recipe.experts, generator) for x in ffn_inputs(model, torch.stack(windows))]


@torch.no_grad()
def ffn_inputs(model: nn.Module, windows: Int64[Tensor, "windows tokens"]) -> list[Float[Tensor, "tokens hidden"]]:
    """The inputs of each layer's FFN on the windows of a text, in the model's dtype."""
    inputs: list[list[Tensor]] = [[] for _ in decoder_ffns(model)]
    hooks = (
        ffn.up.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].flatten(0, -2)))
        for ffn, seen in zip(decoder_ffns(model), inputs, strict=True)
    )
    with attached(hooks):
        for window in windows:
            run_decoder(model, window)
    return [torch.cat(seen) for seen in inputs]


def _centres(
    x: Float[Tensor, "tokens hidden"], count: int, generator: torch.Generator
) -> Float[Tensor, "count hidden"]:
    mean = x.mean(0)
    rows = functional.normalize(x - mean, dim=1)
    centres = rows[torch.randperm(len(rows), generator=generator)[:count]]
    for _ in range(ROUNDS):
        nearest = (rows @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add(0, nearest, rows)
        centres = functional.normalize(sums, dim=1)
    common = functional.normalize(mean, dim=0)
    centres = centres - torch.outer(centres @ common, common)
    return centres / (x @ centres.T).std()


def routing(model: nn.Module, texts: Mapping[str, Int64[Tensor, " n"]], windows: int) -> pd.DataFrame:
    """How the router of each layer shares the tokens of each text out.

    Columns: text, layer, expert, load (share of the layer's uses), token_entropy (of a token's softmax, bits, the mean
    over tokens).
    """
    mixtures, tables = list(mixtures_by_layer(model).items()), []
    for _, experts in mixtures:
        _ = experts.gate  # finding it runs the mixture, and so the hook below
    for text, tokens in texts.items():

        def see(number: int, x: Tensor, ids: Tensor, _: Tensor, text: str = text) -> None:
            layer, experts = mixtures[number]
            uses = ids.flatten().bincount(minlength=experts.count).numpy()
            entropies = torch.special.entr(experts.scores(x).softmax(-1)).sum(-1) / math.log(2)
            own = {"text": text, "layer": layer, "expert": range(experts.count), "load": uses / uses.sum()}
            tables.append(pd.DataFrame({**own, "token_entropy": entropies.mean().item()}))

        with seen_routing(model, see), torch.no_grad():
            for window in tokens[: windows * SEQUENCE_LENGTH].view(windows, SEQUENCE_LENGTH):
                model.base_model(window[None], use_cache=False)
    return pd.concat(tables).groupby(["text", "layer", "expert"], sort=False).mean().reset_index()


def routing_summary(found: pd.DataFrame) -> pd.DataFrame:
    """Means over the layers of what `routing` gives, for each text.

    Columns: text, load_entropy (bits; log2 of the experts if even), largest_load, token_entropy, and shared_load: the
    overlap of the loads with those of the first text, 1 if they are the same.
    """
    texts = found["text"].unique()
    loads = found.pivot(index=["text", "layer"], columns="expert", values="load").loc[texts]
    values = torch.tensor(loads.to_numpy()).view(len(texts), -1, loads.shape[1])  # text, layer, expert
    return pd.DataFrame(
        {
            "text": texts,
            "load_entropy": torch.special.entr(values).sum(-1).mean(1) / math.log(2),
            "largest_load": values.amax(-1).mean(1),
            "token_entropy": found.groupby("text")["token_entropy"].mean()[texts].to_numpy(),
            "shared_load": values.minimum(values[:1]).sum(-1).mean(1),
        }
    )


def make(recipe: Upcycling, out: Path, model: nn.Module, texts: Sequence[Int64[Tensor, " n"]], windows: int) -> None:
    """Upcycle a model to a Mixtral, evaluate it and write its folder in `out`.

    `texts` are calibration and evaluation tokens of each corpus. Raises `UserError` as `upcycle` and `card.write` do.
    """
    parts, curve = upcycle(recipe, model, texts[::2])
    mixtral, folder = as_mixtral(model, parts, recipe.per_token, torch.bfloat16), out / recipe.names()[0]
    by_text, rows = dict(zip(recipe.corpora, texts[1::2], strict=True)), []
    for name, measured in {"dense": model, "upcycled": mixtral}.items():
        for text, tokens in by_text.items():
            value = perplexity(measured, tokens, SEQUENCE_LENGTH, windows)
            rows.append((name, text, float(value), value.standard_error))
    quality = pd.DataFrame(rows, columns=["model", "text", "perplexity", "standard_error"])
    loads = routing(mixtral, by_text, windows)
    tables = {"quality.csv": quality, "summary.csv": routing_summary(loads), "routing.csv": loads.round(6)}
    sizes = {"experts": recipe.experts, "per_token": recipe.per_token, "rank": recipe.rank}
    about = ABOUT.format(name=folder.name, model=recipe.model, file=FILE, even=math.log2(recipe.experts), **sizes)
    save_parts = partial(save, base=model, parts=parts, per_token=recipe.per_token)
    card.write(folder, about, LOSS, "upcycled", asdict(recipe), curve, FILE, save_parts, tables, windows)
