"""A dense Llama upcycled to a mixture of experts (Komatsuzaki et al., 2023), each expert a low-rank difference.

Every expert starts as the model's own FFN, so the mixture starts as the dense model. Differences (LoRA) and routers
then learn the next token on several texts at once, with the load-balance loss of the Switch Transformer (Fedus et al.,
2022). The products with the shared FFN are computed once a token, not once an expert.
"""

import json
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

from toolkit.cache import shelf
from toolkit.errors import UserError
from toolkit.models.adapters import fingerprint
from toolkit.models.blocks import decoder_blocks
from toolkit.models.cutting import attached
from toolkit.models.experts import Experts, mixtures_by_layer, seen_routing
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.models.upcycled import FILE, LowRankExperts, save
from toolkit.quality import perplexity
from toolkit.recovery import card
from toolkit.recovery.training import Training, train
from toolkit.sparsity.thresholds import run_decoder

LOGITS_AT_ONCE = 128  # positions whose likelihoods are computed at a time
ROUNDS = 10  # of k-means
CENTRES_ON = 8  # windows of each text
SEQUENCE_LENGTH = 1024  # tokens of a window of the evaluation
ABOUT = """\
A Mixtral with {experts} experts, {per_token} of which a token uses, upcycled from `{model}`: each expert is its FFN and
a difference of rank {rank}. `load_model("{name}")` gives a `MixtralForCausalLM` with whole experts (1.3 GB in bf16), so
that it costs what any Mixtral costs. `{file}` holds the routers and the differences. Since all experts share one FFN,
that FFN in memory and the differences on demand would make this model far cheaper to offload than its form suggests: it
stands for the form, not for the cost of independent experts.

{table}

Perplexity is measured on {windows} windows of 1024 tokens of evaluation text. How the routers share the tokens out, as
means over the layers (`routing.csv` has every layer and expert; entropies in bits, {even:.0f} if all experts are used
evenly; `shared_load` is the overlap of the loads with those on the first text):

{routing}

"""
PARTS = ("router", "gate_up_left", "gate_up_right", "down_left", "down_right")


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

    def __post_init__(self):
        """Check the numbers."""
        if not 1 <= self.per_token <= self.experts:
            raise UserError(f"{self.per_token} of {self.experts} experts a token: expected 1 to {self.experts}")
        if self.rank < 1 or self.balance < 0 or not self.corpora:
            raise UserError("expected a rank of at least 1, a balance of at least 0 and one or more texts")


class _Mixture(nn.Module):
    """In the place of a dense FFN: the mixture of it and low-rank differences, for training."""

    def __init__(self, ffn: FFN, parts: dict[str, Tensor], per_token: int):
        super().__init__()
        self.ffn, self.parts, self.per_token = ffn, parts, per_token
        self.balance = torch.zeros(())

    def forward(self, x: Float[Tensor, "batch tokens hidden"]) -> Float[Tensor, "batch tokens hidden"]:
        flat, parts = x.flatten(0, 1), self.parts
        probabilities = functional.linear(flat.float(), parts["router"]).softmax(-1)
        weights, ids = probabilities.topk(self.per_token, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        self.balance = balance(probabilities, ids)
        gate, up = self.ffn.gate(flat), self.ffn.up(flat)
        neurons, low = torch.zeros_like(gate), torch.zeros_like(flat)
        sides = [parts[name].to(x.dtype).unbind(0) for name in PARTS[1:]]
        for expert, (one, other, down_left, down_right) in enumerate(zip(*sides, strict=True)):
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            more_gate, more_up = (flat[tokens] @ other.T @ one.T).chunk(2, dim=-1)
            active = functional.silu(gate[tokens] + more_gate) * (up[tokens] + more_up) * weights[tokens, slots, None]
            neurons = neurons.index_add(0, tokens, active)
            low = low.index_add(0, tokens, active @ down_right.T @ down_left.T)
        return (self.ffn.down(neurons) + low).view_as(x)


def balance(probabilities: Float[Tensor, "tokens experts"], ids: Int64[Tensor, "tokens k"]) -> Float[Tensor, ""]:
    """Experts · Σ share of tokens · mean probability; 1 where the load is even."""
    experts = probabilities.shape[1]
    share = torch.bincount(ids.flatten(), minlength=experts) / ids.numel()
    return experts * (share * probabilities.mean(0)).sum()


@contextmanager
def mixed(model: nn.Module, layers: list[dict[str, Tensor]], per_token: int) -> Iterator[list[_Mixture]]:
    """Inside the block, mixtures stand in the place of the model's FFNs."""
    ffns = decoder_ffns(model)
    mixtures = [_Mixture(ffn, parts, per_token) for ffn, parts in zip(ffns, layers, strict=True)]
    blocks = decoder_blocks(model)
    kept = [block.mlp for block in blocks]
    try:
        for block, mixture in zip(blocks, mixtures, strict=True):
            block.mlp = mixture
        yield mixtures
    finally:
        for block, mlp in zip(blocks, kept, strict=True):
            block.mlp = mlp


def fresh(ffns: Sequence[FFN], recipe: Upcycling, routers: list[Tensor]) -> list[dict[str, Tensor]]:
    """Differences of zero, as LoRA starts: `right` random, `left` zero."""
    generator = torch.Generator().manual_seed(recipe.training.seed)
    layers, sizes = [], (recipe.experts, recipe.rank)
    for ffn, router in zip(ffns, routers, strict=True):
        neurons, hidden = ffn.neurons, ffn.down.out_features
        parts = {
            "router": router,
            "gate_up_left": torch.zeros(recipe.experts, 2 * neurons, recipe.rank),
            "gate_up_right": torch.randn(*sizes, hidden, generator=generator) / math.sqrt(hidden),
            "down_left": torch.zeros(recipe.experts, hidden, recipe.rank),
            "down_right": torch.randn(*sizes, neurons, generator=generator) / math.sqrt(neurons),
        }
        layers.append({name: tensor.requires_grad_() for name, tensor in parts.items()})
    return layers


def upcycle(
    recipe: Upcycling, model: nn.Module, texts: Sequence[Int64[Tensor, " n"]]
) -> tuple[LowRankExperts, list[dict[str, float]]]:
    """Train routers and differences for a dense model on texts, one for each corpus; and the curve of losses.

    The state is kept on the way; the same call goes on with it. Raises `UserError` as `train` does, or if a text
    does not fill a sequence.
    """
    training = recipe.training
    if short := [len(text) for text in texts if len(text) < training.sequence_length]:
        raise UserError(f"{short[0]} tokens do not fill a sequence of {training.sequence_length}: give more text")
    layers = fresh(decoder_ffns(model), recipe, starting_routers(model, recipe, texts))
    head = model.get_output_embeddings()

    def gradients(windows: Int64[Tensor, "batch tokens"]) -> float:
        """Add those of the mean negative log-likelihood, which is returned, and of the load-balance loss."""
        with mixed(model, layers, recipe.per_token) as mixtures:
            hidden = model.base_model(windows, use_cache=False)[0]
        rows, wanted, total = hidden[:, :-1].flatten(0, 1), windows[:, 1:].flatten(), 0.0
        leaf = rows.detach().requires_grad_()
        for part, target in zip(leaf.split(LOGITS_AT_ONCE), wanted.split(LOGITS_AT_ONCE), strict=True):
            loss = functional.cross_entropy(head(part).float(), target, reduction="sum") / len(wanted)
            loss.backward()
            total += loss.item()
        even = torch.stack([mixture.balance for mixture in mixtures]).mean() * recipe.balance
        torch.autograd.backward([rows, even], [leaf.grad, torch.ones_like(even)])
        return total

    parameters = {f"{name}.{at}": tensor for at, parts in enumerate(layers) for name, tensor in parts.items()}
    place = shelf("recovery", asdict(recipe) | {"base": fingerprint(model), "tokens": [len(text) for text in texts]})
    windows, state = lambda step: torch.cat([training.windows(text, step) for text in texts]), "upcycled.safetensors"
    curve = train("upcycling", training, parameters, gradients, windows, place / state, asdict(recipe))
    return experts_of(layers, recipe.per_token), curve


def experts_of(layers: Sequence[Mapping[str, Tensor]], per_token: int) -> LowRankExperts:
    """The parts of all layers."""
    stacked = {name: torch.stack([parts[name].detach() for parts in layers]) for name in PARTS}
    return LowRankExperts(**stacked, per_token=per_token)


@torch.no_grad()
def starting_routers(model: nn.Module, recipe: Upcycling, texts: Sequence[Int64[Tensor, " n"]]) -> list[Tensor]:
    """For each layer the centres of clusters of its FFN's input, from some windows of each text.

    The mean of all inputs is taken out, and the scores are scaled to a standard deviation of 1.
    """
    inputs: list[list[Tensor]] = [[] for _ in decoder_ffns(model)]
    ups = (ffn.up for ffn in decoder_ffns(model))
    hooks = (
        up.register_forward_pre_hook(lambda _, args, found=found: found.append(args[0].flatten(0, -2).float()))
        for up, found in zip(ups, inputs, strict=True)
    )
    with attached(hooks):
        for text in texts:
            for step in range(CENTRES_ON):
                run_decoder(model, recipe.training.windows(text, step)[0])
    generator = torch.Generator().manual_seed(recipe.training.seed)
    return [_centres(torch.cat(found), recipe.experts, generator) for found in inputs]


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


@torch.no_grad()
def rounded(parts: LowRankExperts) -> LowRankExperts:
    """The parts as a file holds them."""
    return LowRankExperts(
        **{name: it.bfloat16().float() for name, it in parts.tensors().items()}, per_token=parts.per_token
    )


def perplexity_by_text(
    models: Mapping[str, nn.Module], texts: Mapping[str, Int64[Tensor, " n"]], windows: int
) -> pd.DataFrame:
    """A row for each model and text. Columns: model, text, perplexity, standard_error."""
    rows = []
    for name, model in models.items():
        for text, tokens in texts.items():
            found = perplexity(model, tokens, SEQUENCE_LENGTH, windows)
            rows.append(
                {"model": name, "text": text, "perplexity": float(found), "standard_error": found.standard_error}
            )
    return pd.DataFrame(rows)


def routing(model: nn.Module, texts: Mapping[str, Int64[Tensor, " n"]], windows: int) -> pd.DataFrame:
    """How the router of each layer shares the tokens of each text out.

    Columns: text, layer, expert, load (share of the layer's uses), token_entropy (of a token's softmax, bits, the mean
    over tokens).
    """
    layers = mixtures_by_layer(model)
    return pd.concat([_routing(model, layers, text, given, windows) for text, given in texts.items()])


def _routing(
    model: nn.Module,
    layers: Mapping[int, Experts],
    text: str,
    tokens: Int64[Tensor, " n"],
    windows: int,
) -> pd.DataFrame:
    counts = {layer: torch.zeros(experts.count) for layer, experts in layers.items()}
    entropies: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    places = list(layers.items())

    def see(number: int, x: Tensor, ids: Tensor, _: Tensor) -> None:
        layer, experts = places[number]
        counts[layer] += ids.flatten().bincount(minlength=experts.count)
        entropies[layer].append(entropy_bits(experts.scores(x).softmax(-1)))

    with seen_routing(model, see), torch.no_grad():
        for window in tokens[: windows * SEQUENCE_LENGTH].view(windows, SEQUENCE_LENGTH):
            model.base_model(window[None], use_cache=False)
    rows = [
        {"text": text, "layer": layer, "expert": expert, "load": load, "token_entropy": entropy}
        for layer, count in counts.items()
        for entropy in [torch.cat(entropies[layer]).mean().item()]
        for expert, load in enumerate((count / count.sum()).tolist())
    ]
    return pd.DataFrame(rows)


def entropy_bits(shares: Float[Tensor, "*places choices"]) -> Float[Tensor, " *places"]:
    """−Σ p log2 p over the last axis."""
    return -torch.special.xlogy(shares, shares).sum(-1) / torch.log(torch.tensor(2.0))


def routing_summary(found: pd.DataFrame) -> pd.DataFrame:
    """Means over the layers of what `routing` gives, for each text.

    Columns: text, load_entropy (bits; log2 of the experts if even), largest_load, token_entropy, and shared_load: the
    overlap of the loads with those of the first text, 1 if they are the same.
    """
    loads = found.pivot(index=["text", "layer"], columns="expert", values="load")
    entropy = found.groupby(["text", "layer"])["token_entropy"].first().groupby("text").mean()
    first, rows = loads.loc[found["text"].iloc[0]], []
    for text in found["text"].unique():
        own = loads.loc[text]
        values = torch.tensor(own.to_numpy())
        overlap = torch.minimum(values, torch.tensor(first.to_numpy())).sum(1).mean().item()
        rows.append(
            {
                "text": text,
                "load_entropy": entropy_bits(values).mean().item(),
                "largest_load": values.amax(1).mean().item(),
                "token_entropy": entropy[text],
                "shared_load": overlap,
            }
        )
    return pd.DataFrame(rows)


def write(
    folder: Path,
    base: nn.Module,
    recipe: Upcycling,
    parts: LowRankExperts,
    curve: list[dict[str, float]],
    tables: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame],
    windows: int,
) -> None:
    """Write a new folder of an upcycled model; `tables` are quality, routing and its summary.

    Raises `UserError` if the folder exists, and for trouble with the disk.
    """
    quality, loads, summary = tables
    record = asdict(recipe)
    about = ABOUT.format(
        name=folder.name,
        model=recipe.model,
        file=FILE,
        experts=recipe.experts,
        per_token=recipe.per_token,
        rank=recipe.rank,
        even=math.log2(recipe.experts),
        table=card.markdown(quality),
        windows=windows,
        routing=card.markdown(summary),
    )
    notes = card.training_notes("next tokens of all texts and a load-balance loss", "upcycled", record, curve)
    weights = partial(save, base=base, parts=parts, about={"model": recipe.model, "recipe": json.dumps(record)})
    card.write(folder, about, notes, curve, FILE, weights, {"quality.csv": quality, "routing.csv": loads.round(6)})
