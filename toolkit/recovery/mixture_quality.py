"""The measurements of split and upcycled models: perplexity by experts used and by text, and routers' load."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from toolkit.evaluation import perplexity
from toolkit.models.adapters import Adapters
from toolkit.models.experts import Experts, mixtures_by_layer, seen_routing
from toolkit.models.split_files import SplitParts
from toolkit.models.splitting import Sizes, random_split
from toolkit.recovery.distillation import adapted
from toolkit.recovery.routed import masked, split_parts

FITTED, RANDOM_CLUSTERS, RANDOM_ROUTER, DISTILLED = "fitted", "random clusters", "random router", "distilled"
SEQUENCE_LENGTH = 1024


def active_counts(sizes: Sizes) -> list[int]:
    """Numbers of routed experts that a split model is evaluated with: every other one from 4, and all."""
    return sorted({*range(min(4, sizes.experts), sizes.experts, 2), sizes.experts})


def rivals(
    model: nn.Module, windows: Int64[Tensor, "windows tokens"], sizes: Sizes, fitted: SplitParts
) -> dict[str, SplitParts]:
    """A fitted split, the same with random groups of neurons, and the same with a random router."""
    router = torch.randn(fitted.router.shape, generator=torch.Generator().manual_seed(0))
    return {
        FITTED: fitted,
        RANDOM_CLUSTERS: split_parts(model, windows, sizes, random_split),
        RANDOM_ROUTER: replace(fitted, router=router),
    }


def perplexity_by_experts(
    model: nn.Module,
    tokens: Int64[Tensor, " n"],
    parts: SplitParts,
    active: Iterable[int],
    windows: int,
    sequence_length: int = SEQUENCE_LENGTH,
) -> pd.DataFrame:
    """A row for each number of routed experts that a token uses; the model is dense and stays so.

    Columns: experts_active, perplexity, standard_error.
    """
    rows = []
    adapters = Adapters(parts.differences, torch.zeros(len(parts.router)))
    for count in active:
        with adapted(model, adapters), masked(model, replace(parts, per_token=count), parts.router):
            found = perplexity(model, tokens, sequence_length, windows)
        rows.append({"experts_active": count, "perplexity": float(found), "standard_error": found.standard_error})
    return pd.DataFrame(rows)


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


def routing(
    model: nn.Module, texts: Mapping[str, Int64[Tensor, " n"]], windows: int, sequence_length: int = SEQUENCE_LENGTH
) -> pd.DataFrame:
    """How the router of each layer shares the tokens of each text out.

    Columns: text, layer, expert, load (share of the layer's uses), token_entropy (of a token's softmax, bits, the mean
    over tokens).
    """
    layers = mixtures_by_layer(model)
    return pd.concat([_routing(model, layers, text, given, windows, sequence_length) for text, given in texts.items()])


def _routing(
    model: nn.Module,
    layers: Mapping[int, Experts],
    text: str,
    tokens: Int64[Tensor, " n"],
    windows: int,
    sequence_length: int,
) -> pd.DataFrame:
    counts = {layer: torch.zeros(experts.count) for layer, experts in layers.items()}
    entropies: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    places = list(layers.items())

    def see(number: int, x: Tensor, ids: Tensor, _: Tensor) -> None:
        layer, experts = places[number]
        counts[layer] += ids.flatten().bincount(minlength=experts.count)
        entropies[layer].append(entropy_bits(experts.scores(x).softmax(-1)))

    with seen_routing(model, see), torch.no_grad():
        for window in tokens[: windows * sequence_length].view(windows, sequence_length):
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
