"""Zeros in the inputs of all decoder linears, set by magnitude (TEAL: Liu et al., 2024, arXiv 2408.14690).

    quality(EvaluationSettings("smollm2-135m"), InputZeros(0.4))
    quality(EvaluationSettings("smollm2-135m"), InputZeros(0.4, low_rank=0.1))

A column of a weight whose input is zero need not be read. LLM in a flash leaves out neurons of FFNs alone. R-Sparse
(Zhang et al., 2025, arXiv 2504.19449) has a low-rank copy of each weight stand for the columns that are not read. It
searches a rank for each linear; here all have the same share of the weights' bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.cutting import attached
from toolkit.models.streams import run_decoder
from toolkit.papers.beyond.sparse_curve import FITTED_ON
from toolkit.studies.loaded import loaded, tokens_of
from toolkit.studies.quality import Alteration, EvaluationSettings

SAMPLE = 100_000  # magnitudes of each linear's inputs that its threshold is found among


@dataclass(frozen=True)
class InputZeros(Alteration):
    """The smallest inputs of each decoder linear are zero: those below the quantile `share` on calibration text.

    The fact `skipped` is the share of the decoder's weights that meet a zero on the evaluation text.
    """

    share: float
    """Share of the inputs, the same for every linear."""

    low_rank: float = 0.0
    """Weights of the factors that multiply those inputs instead, over the linear's own; 0: nothing does."""

    @contextmanager
    def change(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """Raises what `decoder_linears` raises."""
        model, facts, zeros = loaded(settings.model)[0], {"skipped": float("nan")}, list[tuple[int, float]]()
        small = dict[nn.Module, Tensor]()  # a linear's small inputs, from before its product until after it

        def cut(limit: float, linear: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            kept = args[0].abs() > limit
            zeros.append((linear.weight.numel(), 1 - kept.double().mean().item()))
            if self.low_rank:
                small[linear] = args[0] * ~kept
            return (args[0] * kept, *args[1:])

        def add(up: Tensor, down: Tensor, linear: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + small.pop(linear) @ down.T @ up.T

        sizes, found = magnitudes(settings.model, settings.corpus), linears(model)
        limits = [float(each[int(self.share * (len(each) - 1))]) for each in sizes]
        pairs = zip(found, limits, strict=True)
        hooks = [linear.register_forward_pre_hook(partial(cut, limit)) for linear, limit in pairs]
        if self.low_rank:
            hooks += [each.register_forward_hook(partial(add, *factors(each.weight, self.low_rank))) for each in found]
        with attached(hooks):
            yield facts
        facts["skipped"] = sum(weights * share for weights, share in zeros) / sum(weights for weights, _ in zeros)


def factors(
    weight: Float[Tensor, "outputs inputs"], share: float
) -> tuple[Float[Tensor, "outputs rank"], Float[Tensor, "rank inputs"]]:
    """The two factors with at most a share of a weight's elements, rank 1 at least, whose product is nearest to it.

    It is the cut singular value decomposition (Eckart and Young, 1936).
    """
    outputs, inputs = weight.shape
    if outputs < inputs:
        up, down = factors(weight.T, share)
        return down.T, up.T
    rank = max(1, int(share * weight.numel() / (outputs + inputs)))
    exact = weight.detach().double()
    basis = torch.linalg.eigh(exact.T @ exact).eigenvectors[:, -rank:]  # the right singular vectors
    return (exact @ basis).to(weight.dtype), basis.T.to(weight.dtype)


def linears(model: nn.Module) -> list[nn.Linear]:
    """The linears of all decoder blocks, in order."""
    return [linear for block in decoder_blocks(model) for linear in decoder_linears(block).values()]


@lru_cache(maxsize=1)
@torch.no_grad()
def magnitudes(name: str, corpus: str) -> list[Float32[Tensor, " sample"]]:
    """Rising magnitudes of each linear's inputs on calibration text, up to `SAMPLE` of them."""
    model, seen = loaded(name)[0], dict[int, list[Tensor]]()

    def see(number: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        sizes = args[0].abs().float().flatten()
        seen.setdefault(number, []).append(sizes[:: max(1, sizes.numel() * FITTED_ON.windows // SAMPLE)].clone())

    found = linears(model)
    with attached(each.register_forward_pre_hook(partial(see, number)) for number, each in enumerate(found)):
        for window in FITTED_ON.draw(tokens_of(name, corpus, "calibration")):
            run_decoder(model, window)
    return [torch.cat(seen[number]).sort().values for number in range(len(found))]
