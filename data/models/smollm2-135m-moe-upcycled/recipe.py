"""How `smollm2-135m-moe-upcycled` was made: a dense Llama becomes a mixture, each expert its FFN and a difference.

    .venv/bin/python data/models/smollm2-135m-moe-upcycled/recipe.py smollm2-135m --out adapters

Every expert starts as the model's own FFN, so the mixture starts as the dense model (Komatsuzaki et al., 2023).
Differences of low rank (LoRA) and routers then learn the next token on two texts at once, with the load-balance loss
of the Switch Transformer (Fedus et al., 2022). The products with the shared FFN are computed once a token, not once an
expert.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import run_command
from toolkit.files import new_folder
from toolkit.models import fast_dtype, load_model, named
from toolkit.models.adapters import rounded
from toolkit.models.cutting import attached
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.models.upcycled import as_mixtral, check_llama, save
from toolkit.progress import progress
from toolkit.quality import load_tokens, perplexity
from toolkit.sparsity.thresholds import run_decoder

EXPERTS, PER_TOKEN, RANK = 8, 2, 8
CORPORA = ("wiki-slice", "python-sources")
BALANCE = 0.05  # factor of the load-balance loss, which is 1 where all experts have the same load
STEPS, SEQUENCE_LENGTH = 120, 256  # a step takes one sequence of each text
LEARNING_RATE, WARM_UP, BETAS = 2e-3, 10, (0.9, 0.95)  # of Adam; the rate falls to 0 as a cosine does
POSITIONS = 128  # whose likelihoods are computed at a time: logits of a whole sequence take more memory than all else
ROUNDS, CENTRES_ON = 10, 8  # of k-means for the routers: rounds, and sequences of each text
EVALUATED_ON = (1024, 6)  # length and number of windows
PARTS = ("router", "gate_up_left", "gate_up_right", "down_left", "down_right")  # of `toolkit.models.upcycled`


def main() -> int:
    """Make the mixture of a dense model; 0 if all is well, 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2-135m, a folder in Hugging Face's layout, or an id on the hub")
    parser.add_argument("--out", type=Path, required=True, help="where the folder is made")
    options = parser.parse_args()
    return run_command(lambda: make(options.model, options.out))


def make(name: str, out: Path) -> None:
    """Train the mixture, evaluate it, and write its folder."""
    model, tokenizer = load_model(name, fast_dtype())
    parts, curve = upcycle(model, [load_tokens(corpus, tokenizer, "calibration") for corpus in CORPORA])
    mixtral, rows = as_mixtral(model, parts, PER_TOKEN, torch.bfloat16), []
    for corpus in CORPORA:
        tokens = load_tokens(corpus, tokenizer, "evaluation")
        for label, evaluated in {"dense": model, "upcycled": mixtral}.items():
            value = perplexity(evaluated, tokens, *EVALUATED_ON)
            rows.append((label, corpus, float(value), value.standard_error))
    quality = pd.DataFrame(rows, columns=["model", "text", "perplexity", "standard_error"])
    with new_folder(out / f"{Path(name).name}-moe-upcycled") as folder:
        save(folder / named.EXPERTS, model, parts, PER_TOKEN, {"model": name})
        pd.DataFrame(curve).to_csv(folder / "curve.csv", index=False)
        quality.to_csv(folder / "quality.csv", index=False)
    print(quality.to_string(index=False))


def upcycle(model: nn.Module, texts: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Train the parts of a mixture, rounded as a file rounds them; and the loss of each step."""
    check_llama(model)
    parts, curve = fresh(decoder_ffns(model), starting_routers(model, texts)), []
    optimiser = torch.optim.Adam(parts.values(), betas=BETAS)
    with progress("upcycling", STEPS, "steps") as bar:
        for step in range(STEPS):
            rise = min(1, (step + 1) / WARM_UP)
            optimiser.param_groups[0]["lr"] = LEARNING_RATE * rise * (1 + math.cos(math.pi * step / STEPS)) / 2
            optimiser.zero_grad()
            with torch.enable_grad():
                loss = backward(model, parts, torch.stack([sequence(text, step) for text in texts]))
            optimiser.step()
            curve.append({"step": step + 1, "loss": loss})
            bar.update()
    return {name: rounded(part.detach()) for name, part in parts.items()}, curve


def sequence(tokens: Tensor, step: int) -> Tensor:
    """The tokens of a step: each part of the text once, in random order, then again in another order."""
    parts = tokens[: len(tokens) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    epoch, place = divmod(step, len(parts))
    return parts[torch.randperm(len(parts), generator=torch.Generator().manual_seed(epoch))[place]]


def backward(model: nn.Module, parts: Mapping[str, Tensor], windows: Tensor) -> float:
    """Add gradients of the mean negative log-likelihood, which is returned, and of the load-balance loss."""
    with mixed(model, parts) as balances:
        hidden = model.base_model(windows, use_cache=False)[0]
    rows, targets, total = hidden[:, :-1].flatten(0, 1), windows[:, 1:].flatten(), 0.0
    leaf = rows.detach().requires_grad_()
    for part, target in zip(leaf.split(POSITIONS), targets.split(POSITIONS), strict=True):
        logits = model.get_output_embeddings()(part).float()
        loss = functional.cross_entropy(logits, target, reduction="sum") / len(targets)
        loss.backward()
        total += loss.item()
    even = torch.stack(balances).mean() * BALANCE
    torch.autograd.backward([rows, even], [leaf.grad, torch.ones_like(even)])
    return total


def fresh(ffns: Sequence[FFN], routers: Sequence[Tensor]) -> dict[str, Tensor]:
    """Parts with differences of zero, as LoRA starts: `right` is random and `left` zero."""
    generator, layers = torch.Generator().manual_seed(0), []
    for ffn, router in zip(ffns, routers, strict=True):
        neurons, hidden = ffn.neurons, ffn.down.out_features
        gate_up_right = torch.randn(EXPERTS, RANK, hidden, generator=generator) / math.sqrt(hidden)
        down_right = torch.randn(EXPERTS, RANK, neurons, generator=generator) / math.sqrt(neurons)
        lefts = torch.zeros(EXPERTS, 2 * neurons, RANK), torch.zeros(EXPERTS, hidden, RANK)
        layers.append((router, lefts[0], gate_up_right, lefts[1], down_right))
    stacked = map(torch.stack, zip(*layers, strict=True))
    return {name: tensor.requires_grad_() for name, tensor in zip(PARTS, stacked, strict=True)}


@contextmanager
def mixed(model: nn.Module, parts: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """Inside the block, FFNs are mixtures; gives the list that gets each one's load-balance loss."""
    balances: list[Tensor] = []
    ffns, layers = decoder_ffns(model), zip(*(parts[name].unbind(0) for name in PARTS), strict=True)
    try:
        for ffn, (router, *sides) in zip(ffns, layers, strict=True):
            ffn.module.forward = partial(mixture, ffn, router, sides, balances)
        yield balances
    finally:
        for ffn in ffns:
            vars(ffn.module).pop("forward", None)


def mixture(ffn: FFN, router: Tensor, sides: Sequence[Tensor], balances: list[Tensor], x: Tensor) -> Tensor:
    """The outputs of a layer's experts for `x` of batch × tokens × hidden."""
    flat = x.flatten(0, 1)
    probabilities = functional.linear(flat.float(), router).softmax(-1)
    weights, ids = probabilities.topk(PER_TOKEN, dim=-1)
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


def balance(probabilities: Tensor, ids: Tensor) -> Tensor:
    """Experts · Σ share of tokens · mean probability; 1 where the load is even."""
    experts = probabilities.shape[1]
    share = torch.bincount(ids.flatten(), minlength=experts) / ids.numel()
    return experts * (share * probabilities.mean(0)).sum()


@torch.no_grad()
def starting_routers(model: nn.Module, texts: Sequence[Tensor]) -> list[Tensor]:
    """For each layer the centres of clusters of its FFN's input, from some sequences of each text.

    The mean of all inputs is taken out, and the scores are scaled to a standard deviation of 1.
    """
    inputs: list[list[Tensor]] = [[] for _ in decoder_ffns(model)]
    hooks = (
        ffn.up.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].flatten(0, -2)))
        for ffn, seen in zip(decoder_ffns(model), inputs, strict=True)
    )
    with attached(hooks):
        for text in texts:
            for step in range(CENTRES_ON):
                run_decoder(model, sequence(text, step))
    generator = torch.Generator().manual_seed(0)
    return [centres(torch.cat(seen).float(), generator) for seen in inputs]


def centres(x: Tensor, generator: torch.Generator) -> Tensor:
    """Spherical k-means of the rows of `x`, as many centres as experts."""
    mean = x.mean(0)
    rows = functional.normalize(x - mean, dim=1)
    found = rows[torch.randperm(len(rows), generator=generator)[:EXPERTS]]
    for _ in range(ROUNDS):
        nearest = (rows @ found.T).argmax(1)
        found = functional.normalize(torch.zeros_like(found).index_add(0, nearest, rows), dim=1)
    common = functional.normalize(mean, dim=0)
    found = found - torch.outer(found @ common, common)
    return found / (x @ found.T).std()


if __name__ == "__main__":
    sys.exit(main())
