"""Training of low-rank predictors (LLM in a flash, section 3.1).

A predictor starts from the best linear guess of the bits through so many numbers (reduced-rank regression: Izenman,
1975), which takes no steps. Then Adam lowers a logistic loss that weighs active and inactive neurons alike.
"""

import torch
from jaxtyping import Bool, Float32
from torch import Tensor
from torch.nn import functional

EPOCHS, BATCH, RATE = 2, 128, 2e-3
RIDGE = 1e-3  # of the mean of the squared inputs
STEEP = 4.0  # logits for a difference of 1 in the guess


def fit_logits(
    x: Float32[Tensor, "tokens hidden"],
    active: Bool[Tensor, "tokens neurons"],
    rank: int,
    epochs: int,
    generator: torch.Generator,
) -> list[Float32[Tensor, "..."]]:
    """Both matrices and the bias of one layer's low-rank predictor."""
    bits = active.float()
    share = bits.mean().clamp(1 / bits.numel(), 1 - 1 / bits.numel())
    inward, outward = reduced_rank(x, bits - bits.mean(0), rank)
    weights = [inward, STEEP * outward, STEEP * (bits.mean(0) - share)]
    weights = [weight.clone().requires_grad_() for weight in weights]
    optimiser = torch.optim.Adam(weights, lr=RATE)
    with torch.enable_grad():
        for _ in range(epochs):
            for batch in torch.randperm(len(x), generator=generator).split(BATCH):
                logits = functional.linear(functional.linear(x[batch], weights[0]), weights[1], weights[2])
                loss = balanced_loss(logits, bits[batch], share)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return [weight.detach() for weight in weights]


def balanced_loss(
    logits: Float32[Tensor, "tokens neurons"], bits: Float32[Tensor, "tokens neurons"], share: Float32[Tensor, ""]
) -> Float32[Tensor, ""]:
    """The mean logistic loss in which active neurons, a share `share` of all, weigh as much as the others together."""
    return functional.binary_cross_entropy_with_logits(logits, bits, pos_weight=(1 - share) / share)


def reduced_rank(
    x: Float32[Tensor, "tokens hidden"], y: Float32[Tensor, "tokens neurons"], rank: int
) -> tuple[Float32[Tensor, "rank hidden"], Float32[Tensor, "neurons rank"]]:
    """The matrices A, B for which x Aᵀ Bᵀ is the best guess of y, by least squares with a little ridge."""
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    values, vectors = torch.linalg.eigh(gram)
    whitening = vectors / values.sqrt()  # (x whitening)ᵀ (x whitening) is the identity
    cross = whitening.T @ (x.T @ y)
    _, directions = torch.linalg.eigh(cross @ cross.T)  # rising
    directions = directions[:, -rank:]
    return (whitening @ directions).T.contiguous(), cross.T @ directions
