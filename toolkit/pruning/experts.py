"""Prune or quantise the experts of a mixture in place: each expert's matrices, by the tokens that are routed to it.

    change_experts(model, METHODS["wanda"], windows, sparsity=0.5, pattern=None)
    change_experts(model, lambda weight, gram: SpQR()(weight, gram).decode(), windows)

`prune` walks over `nn.Linear`, which experts are not: they are views of fused parameters (`toolkit.models.experts`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models.activation import activation, activation_name
from toolkit.models.cutting import attached
from toolkit.models.experts import Experts, decoder_experts
from toolkit.progress import progress
from toolkit.pruning.calibration import checked_windows, inference

Change = Callable[..., Tensor]


@torch.no_grad()
def change_experts(model: nn.Module, change: Change, windows: Int64[Tensor, "windows tokens"], **settings) -> int:
    """Put `change(weight, gram, **settings)` in the place of every matrix of every routed expert; their number.

    `weight` is float32 [rows, columns], `gram` is XᵀX [columns, columns] of the matrix's inputs: those of the tokens
    routed to the expert, or the identity if there are none. Methods of `toolkit.pruning.METHODS` fit. All windows run
    at once through each block, and each block gets the outputs of the changed blocks before it; attention and shared
    FFNs stay as they are.

    Raises `UserError` for a model without experts, windows that do not fit it, and what `change` raises.
    """
    layers = [experts for experts in decoder_experts(model) if experts is not None]
    if not layers:
        raise UserError(f"{type(model).__name__} has no experts: use `toolkit.pruning.prune`")
    windows, act = checked_windows(model, windows), activation(activation_name(model))
    with inference(model), progress("changing experts", len(layers), "layers") as bar:

        def run(experts: Experts, _: nn.Module, args: tuple[Any, ...]) -> None:
            _change_layer(experts, args[0].flatten(0, -2), act, partial(change, **settings))
            bar.update()

        with attached(experts.module.register_forward_pre_hook(partial(run, experts)) for experts in layers):
            model.base_model(windows.to(model.device), use_cache=False)
    return 3 * sum(experts.count for experts in layers)


def _change_layer(experts: Experts, x: Float[Tensor, "tokens hidden"], act: Callable, change: Change) -> None:
    ids, _ = experts.route(x)
    for expert in range(experts.count):
        own = x[(ids == expert).any(1)]
        gate, up, down = experts.matrices(expert)
        neurons = act(own @ gate.T) * (own @ up.T)  # of the unchanged matrices, as `prune` has them within a block
        for matrix, inputs in ((gate, own), (up, own), (down.T, neurons)):
            matrix.copy_(change(matrix.float(), _gram(inputs)))


def _gram(inputs: Float[Tensor, "tokens columns"]) -> Float[Tensor, "columns columns"]:
    rows = inputs.float()
    return rows.T @ rows if len(rows) else torch.eye(rows.shape[1], device=rows.device)
