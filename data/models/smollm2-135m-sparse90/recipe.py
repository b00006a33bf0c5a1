"""How `smollm2-135m-sparse90` was made: FFN outputs are cut by thresholds, and adapters give the quality back.

    .venv/bin/python data/models/smollm2-135m-sparse90/recipe.py smollm2-135m --out adapters

The loss of a token is the Kullback-Leibler divergence of the student's distribution from the dense model's over the
whole vocabulary (Hinton et al., 2015). Both have the same frozen weights. The student adds differences of low rank
(LoRA: Hu et al., 2022). Its thresholds follow a running quantile of its neurons' outputs, so that the share of zeros
stays. Gradients pass active neurons. Shares of zeros rise: each training starts from the adapters of the one before.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import run_command
from toolkit.files import new_folder
from toolkit.models import fast_dtype, load_model
from toolkit.models.adapters import Adapters, LowRankDifference, as_stored, named_linears, save, sides
from toolkit.models.cutting import attached
from toolkit.models.ffn import decoder_ffns
from toolkit.models.named import ADAPTERS
from toolkit.progress import progress
from toolkit.quality import load_tokens, perplexity
from toolkit.sparsity.calibration import Calibration, checked_windows
from toolkit.sparsity.shares import shares
from toolkit.sparsity.thresholds import run_decoder, thresholded, watched

ZEROS, STEPS = (0.8, 0.85, 0.9), (400, 300, 300)  # mean share of zeros over the layers, and steps of its training
RANK, DOWN_RANK = 24, 80  # of the differences of linears, and of down projections
SEQUENCE_LENGTH = 512  # of a step, which has one sequence
LEARNING_RATE, WARM_UP, BETAS = 2e-3, 5, (0.9, 0.95)  # of Adam; the rate falls to 0 as a cosine does
FOLLOW = 0.05  # how far a sequence draws a threshold towards its own quantile
FITTED_ON = Calibration(windows=8, sequence_length=256)  # for shares of zeros and thresholds
EVALUATED_ON = (1024, 6)  # length and number of windows
POSITIONS = 128  # whose distributions are compared at a time: logits of a whole sequence take more memory than all else
SAMPLE = 1 << 16  # magnitudes of a sequence that a quantile is taken of
Curve = list[dict[str, float]]


def main() -> int:
    """Make the models of a dense one; 0 if all is well, 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2-135m, a folder in Hugging Face's layout, or an id on the hub")
    parser.add_argument("--out", type=Path, required=True, help="where a folder is made for each share of zeros")
    options = parser.parse_args()
    return run_command(lambda: make(options.model, options.out))


def make(name: str, out: Path) -> None:
    """Make each model, evaluate it, and write its folder."""
    model, tokenizer = load_model(name, fast_dtype())
    tokens, evaluation = (load_tokens("wiki-slice", tokenizer, split) for split in ("calibration", "evaluation"))
    for zeros, (adapters, alone, curve) in zip(ZEROS, recover(model, tokens), strict=True):
        versions = {"dense": None, "thresholds alone": alone, "recovered": adapters}
        quality = pd.DataFrame([{"version": key, **evaluate(model, evaluation, it)} for key, it in versions.items()])
        with new_folder(out / f"{Path(name).name}-sparse{zeros * 100:g}") as folder:
            save(folder / ADAPTERS, model, adapters, {"model": name})
            pd.DataFrame(curve).to_csv(folder / "curve.csv", index=False)
            quality.to_csv(folder / "quality.csv", index=False)
        print(quality.to_string(index=False), flush=True)


def recover(model: nn.Module, tokens: Tensor) -> Iterator[tuple[Adapters, Adapters, Curve]]:
    """For each share of zeros: adapters as their file gives them back, thresholds alone, and the loss of each step."""
    adapters = Adapters(fresh(model), torch.zeros(len(decoder_ffns(model))))
    for seed, layers in enumerate(shares(model, FITTED_ON.draw(tokens), ZEROS)):
        start = refitted(model, adapters, tokens, layers)
        learnt, curve = distil(model, tokens, layers, start, STEPS[seed], seed)
        adapters = refitted(model, replace(learnt, differences=as_stored(learnt.differences)), tokens, layers)
        yield adapters, refitted(model, replace(adapters, differences={}), tokens, layers), curve


def fresh(model: nn.Module) -> dict[str, LowRankDifference]:
    """Differences of zero for every decoder linear: `right` is random and `left` zero, as LoRA starts."""
    generator, downs = torch.Generator().manual_seed(0), {ffn.down for ffn in decoder_ffns(model)}
    lows = {}
    for name, linear in named_linears(model):
        rows, columns = linear.weight.shape
        rank = min(DOWN_RANK if linear in downs else RANK, rows, columns)
        right = torch.randn(rank, columns, generator=generator) / math.sqrt(columns)
        lows[name] = LowRankDifference(torch.zeros(rows, rank), right)
    return lows


def distil(
    model: nn.Module, tokens: Tensor, zeros: Sequence[float], start: Adapters, steps: int, seed: int
) -> tuple[Adapters, Curve]:
    """Train adapters with a share of zeros for each layer; the dense model stays as it was."""
    leaf = lambda tensor: tensor.detach().float().clone().requires_grad_()  # noqa: E731
    lows = {name: LowRankDifference(*map(leaf, low)) for name, low in start.differences.items()}
    adapters = replace(start, differences=lows, thresholds=start.thresholds.clone())
    optimiser, curve = torch.optim.Adam(sides(lows).values(), betas=BETAS), []
    with progress("distilling", steps, "steps") as bar:
        for step in range(steps):
            window = checked_windows(model, sequence(tokens, step, seed)[None])
            with torch.no_grad():
                teacher = model.base_model(window, use_cache=False)[0]
            rise = min(1, (step + 1) / WARM_UP)
            optimiser.param_groups[0]["lr"] = LEARNING_RATE * rise * (1 + math.cos(math.pi * step / steps)) / 2
            optimiser.zero_grad()
            with torch.enable_grad(), adapted(model, lows), cutting(model, adapters.thresholds, zeros, lambda: FOLLOW):
                student = model.base_model(window, use_cache=False)[0]
                loss = backward_divergence(model.get_output_embeddings(), student, teacher)
            optimiser.step()
            curve.append({"step": step + 1, "loss": loss})
            bar.update()
    learnt = {name: LowRankDifference(*map(Tensor.detach, low)) for name, low in lows.items()}
    return replace(adapters, differences=learnt), curve


def sequence(tokens: Tensor, step: int, seed: int) -> Tensor:
    """The tokens of a step: each part of the text once, in random order, then again in another order."""
    parts = tokens[: len(tokens) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    epoch, place = divmod(step, len(parts))
    return parts[torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))[place]]


def backward_divergence(head: nn.Module, student: Tensor, teacher: Tensor) -> float:
    """Add the gradients of the mean divergence, a few positions at a time, and return its value."""
    leaf, total = student.detach().requires_grad_(), 0.0
    for part, target in zip(leaf.split(POSITIONS, dim=1), teacher.split(POSITIONS, dim=1), strict=True):
        with torch.no_grad():
            wanted = head(target).float().log_softmax(-1)
        ours = head(part).float().log_softmax(-1)
        loss = functional.kl_div(ours, wanted, log_target=True, reduction="sum") / student.shape[1]
        loss.backward()
        total += loss.item()
    student.backward(leaf.grad)
    return total


@torch.no_grad()
def refitted(model: nn.Module, adapters: Adapters, tokens: Tensor, zeros: Sequence[float]) -> Adapters:
    """The same differences, with thresholds that give each layer its share of zeros while all others are in place.

    Each is the mean over the windows of a window's quantile.
    """
    limits, seen = torch.zeros(len(zeros)), 0
    with adapted(model, adapters.differences), cutting(model, limits, zeros, lambda: 1 / seen):
        for window in checked_windows(model, FITTED_ON.draw(tokens)):
            seen += 1
            run_decoder(model, window)
    return replace(adapters, thresholds=limits)


@contextmanager
def adapted(model: nn.Module, lows: Mapping[str, LowRankDifference]) -> Iterator[None]:
    """Inside the block, products have the differences added; weights do not change."""

    def add(low: LowRankDifference, _: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        (x,) = args
        return output + functional.linear(functional.linear(x, low.right.to(x.dtype)), low.left.to(x.dtype))

    linears = dict(named_linears(model))
    with attached(linears[name].register_forward_hook(partial(add, low)) for name, low in lows.items()):
        yield


@contextmanager
def cutting(model: nn.Module, limits: Tensor, zeros: Sequence[float], rate: Callable[[], float]) -> Iterator[None]:
    """Inside the block FFNs cut their neurons, and each sequence moves `limits` towards its own quantiles by `rate`."""

    def cut(layer: int, _: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        (outputs,) = args
        magnitudes = outputs.detach().flatten().abs().float()
        sample = magnitudes[:: max(1, len(magnitudes) // SAMPLE)]
        quantile = sample.kthvalue(max(1, round(zeros[layer] * len(sample)))).values.item()
        limits[layer] += rate() * (quantile - limits[layer])
        return (outputs.masked_fill(outputs.abs() <= limits[layer].item(), 0),)

    ffns = decoder_ffns(model)
    with attached(ffn.down.register_forward_pre_hook(partial(cut, layer)) for layer, ffn in enumerate(ffns)):
        yield


def evaluate(model: nn.Module, tokens: Tensor, adapters: Adapters | None) -> dict[str, float]:
    """Perplexity and share of zeros on the first windows of a text; of the dense model without adapters."""
    shares_seen: list[float] = []
    with ExitStack() as stack:
        if adapters is not None:
            stack.enter_context(adapted(model, adapters.differences))
            stack.enter_context(thresholded(model, adapters.thresholds))
        see = lambda _, outputs: shares_seen.append((outputs == 0).double().mean().item())  # noqa: E731
        stack.enter_context(watched(model, see))
        return {"perplexity": float(perplexity(model, tokens, *EVALUATED_ON)), "zeros": fmean(shares_seen)}


if __name__ == "__main__":
    sys.exit(main())
