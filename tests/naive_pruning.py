"""Slow, obvious pruning: Python sorts, explicit inverses, the whole model run anew for every block."""

import torch
from torch import nn

BLOCK = 128


def wanda(weight, inputs, sparsity, groups=None):
    """One output row after the other; `groups` is (kept, group) of N:M."""
    norms = [float(column.norm()) for column in inputs.T]
    pruned = weight.clone()
    for i, row in enumerate(weight.tolist()):
        for first, stop, zeros in spans(len(row), sparsity, groups):
            order = sorted(range(first, stop), key=lambda j: abs(row[j]) * norms[j])
            pruned[i, order[:zeros]] = 0
    return pruned


def magnitude(weight, inputs, sparsity, groups=None):
    if groups:
        return wanda(weight, torch.eye(weight.shape[1]), sparsity, groups)
    flat = weight.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda j: abs(flat[j]))
    pruned = weight.flatten().clone()
    pruned[order[: int(len(flat) * sparsity)]] = 0
    return pruned.view_as(weight)


def sparsegpt(weight, inputs, sparsity, groups=None, damping=0.01, block=BLOCK):
    """Optimal brain surgeon, column by column: for each, the inverse Hessian of the columns from it on."""
    inputs, pruned = inputs.double(), weight.double().clone()
    rows, columns = weight.shape
    hessian = 2 * inputs.T @ inputs / len(inputs)
    dead = [j for j in range(columns) if hessian[j, j] == 0]
    hessian += damping * hessian.diagonal().mean() * torch.eye(columns)
    for j in dead:
        hessian[j, j] = 1
        pruned[:, j] = 0
    inverse = [torch.linalg.inv(hessian[j:, j:]) for j in range(columns)]
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    for j in range(columns):
        if groups and j % groups[1] == 0:
            for i in range(rows):
                order = sorted(range(j, j + groups[1]), key=lambda k: pruned[i, k] ** 2 / inverse[k][0, 0])
                mask[i, order[: groups[1] - groups[0]]] = True
        if not groups and j % block == 0:
            stop = min(j + block, columns)
            cells = [(i, k) for i in range(rows) for k in range(j, stop)]
            cells.sort(key=lambda cell: pruned[cell] ** 2 / inverse[cell[1]][0, 0])
            for cell in cells[: int(len(cells) * sparsity)]:
                mask[cell] = True
        for i in range(rows):
            if mask[i, j]:
                pruned[i, j:] -= pruned[i, j] / inverse[j][0, 0] * inverse[j][0]
                pruned[i, j] = 0
    return pruned.to(weight.dtype)


def spans(columns, sparsity, groups):
    """(first, stop, zeros) of each stretch of a row in which weights compete."""
    if not groups:
        return [(0, columns, int(columns * sparsity))]
    kept, group = groups
    return [(first, first + group, group - kept) for first in range(0, columns, group)]


METHODS = {"magnitude": magnitude, "sparsegpt": sparsegpt, "wanda": wanda}


def linears(model, block):
    """The linears of the block with this number, by full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"layers.{block}." in name
    }


def layer_inputs(model, windows, block):
    """The inputs of each linear of a block, [tokens, columns], in plain forward passes of the whole model."""
    seen = {name: [] for name in linears(model, block)}
    handles = [
        module.register_forward_hook(lambda _, args, output, name=name: seen[name].append(args[0].flatten(0, -2)))
        for name, module in linears(model, block).items()
    ]
    with torch.no_grad():
        for window in windows:
            model(window[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts).float() for name, parts in seen.items()}


def prune(model, method, windows, sparsity=0.5, groups=None):
    """Block after block, each linear on what it sees when all earlier blocks are pruned."""
    for block in range(model.config.num_hidden_layers):
        inputs = layer_inputs(model, windows, block)
        for name, module in linears(model, block).items():
            module.weight.data = METHODS[method](module.weight.detach(), inputs[name], sparsity, groups)
