"""Where the zeros of a pruned model are: by layer, operation, row and block, and where two methods choose differently.

A mask is a boolean matrix [rows, columns], true where the weight is zero.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models import decoder_blocks, decoder_linears

BLOCKS = ((16, 16), (1, 4096))  # rows × columns: a tensor core's tile, and the piece of a row that one warp unpacks
GROUP, KEPT = 4, 2  # of 2:4


def masks(model: nn.Module) -> Iterator[tuple[int, str, Bool[Tensor, "rows columns"]]]:
    """The number of the decoder block, the operation's name in it, and its mask, for every decoder linear in order."""
    for layer, block in enumerate(decoder_blocks(model)):
        for name, linear in decoder_linears(block).items():
            yield layer, name.rpartition(".")[2], (linear.weight.detach() == 0).cpu()


def zeros_by_block(mask: Bool[Tensor, "rows columns"], block: tuple[int, int]) -> Float[Tensor, "tall wide"]:
    """The share of zeros in each block of `block` rows × columns; a block at the edge counts what it has.

    Raises `UserError` for a block without rows or columns.
    """
    if min(block) < 1:
        raise UserError(f"block {block} is empty; give rows × columns, each at least 1")
    return _block_sums(mask, block) / _block_sums(torch.ones_like(mask), block)


def row_zeros(mask: Bool[Tensor, "rows columns"]) -> Int[Tensor, " rows"]:
    """How many zeros each row has."""
    return mask.sum(dim=1)


def ell_padding(mask: Bool[Tensor, "rows columns"]) -> float:
    """Slots that ELL adds over the non-zeros, as a share of them: all rows are as long as the longest.

    0 where all rows have as many non-zeros; 0 too for a matrix of zeros alone.
    """
    lengths = mask.shape[1] - row_zeros(mask)
    total = int(lengths.sum())
    return int(lengths.max()) * len(lengths) / total - 1 if total else 0.0


def lost_to_two_four(mask: Bool[Tensor, "rows columns"]) -> float:
    """The share of non-zeros that 2:4 cannot hold: those beyond two in a group of four; a last group may be short."""
    short = -mask.shape[1] % GROUP
    kept = functional.pad(~mask, (0, short)).unflatten(1, (-1, GROUP)).sum(dim=2)
    total = int(kept.sum())
    return int((kept - KEPT).clamp(min=0).sum()) / total if total else 0.0


def jaccard(first: Bool[Tensor, "rows columns"], second: Bool[Tensor, "rows columns"]) -> float:
    """Zeros that two masks share over zeros that either has; 1 where neither has any."""
    either = int((first | second).sum())
    return int((first & second).sum()) / either if either else 1.0


def chance_jaccard(first: float, second: float) -> float:
    """The expected `jaccard` of two independent random masks of these sparsities."""
    either = first + second - first * second
    return first * second / either if either else 1.0


def zeros(model: nn.Module) -> pd.DataFrame:
    """One row a decoder linear: how many zeros it has and how evenly they lie.

    Columns: layer, op, rows, columns, sparsity, row_lowest and row_highest (sparsity of the row with the fewest and
    most zeros), row_spread (standard deviation over rows), spread_<rows>x<columns> (the same over `BLOCKS`),
    random_<rows>x<columns> (what it would be if zeros fell at random, by the binomial law), ell_padding
    (`ell_padding`), lost_to_two_four (`lost_to_two_four`).
    """
    return pd.DataFrame([{"layer": layer, "op": op} | _zeros(mask) for layer, op, mask in masks(model)])


def overlaps(models: Mapping[str, nn.Module]) -> pd.DataFrame:
    """Where the masks of two models (name → model) agree: one row a decoder linear and pair of models.

    Columns: layer, op, first, second, agreement (share of weights that both keep or both drop), jaccard (of the zeros),
    chance (`chance_jaccard`). Raises `UserError` for fewer than two models, or models of unlike shapes.
    """
    if len(models) < 2:
        raise UserError(f"{len(models)} model cannot be compared; give at least two")
    rows = []
    for linears in zip(*(masks(model) for model in models.values()), strict=True):
        named = dict(zip(models, (mask for _, _, mask in linears), strict=True))
        if len({mask.shape for mask in named.values()}) > 1:
            raise UserError(f"linear {linears[0][1]} of layer {linears[0][0]} differs in shape; compare like models")
        for first, second in combinations(named, 2):
            one, other = named[first], named[second]
            found = {"agreement": share(one == other), "jaccard": jaccard(one, other)}
            found["chance"] = chance_jaccard(share(one), share(other))
            rows.append({"layer": linears[0][0], "op": linears[0][1], "first": first, "second": second} | found)
    return pd.DataFrame(rows)


def share(mask: Bool[Tensor, "rows columns"]) -> float:
    """The share of true elements."""
    return int(mask.sum()) / mask.numel()


def _zeros(mask: Tensor) -> dict[str, float]:
    rows, columns = mask.shape
    by_row, sparsity = row_zeros(mask).double() / columns, share(mask)
    found = {"rows": rows, "columns": columns, "sparsity": sparsity}
    found |= {"row_lowest": by_row.min().item(), "row_highest": by_row.max().item()}
    found["row_spread"] = by_row.std(correction=0).item()
    for block in BLOCKS:
        size = min(block[0], rows) * min(block[1], columns)
        name = "x".join(map(str, block))
        found[f"spread_{name}"] = zeros_by_block(mask, block).std(correction=0).item()
        found[f"random_{name}"] = (sparsity * (1 - sparsity) / size) ** 0.5
    return found | {"ell_padding": ell_padding(mask), "lost_to_two_four": lost_to_two_four(mask)}


def _block_sums(cells: Tensor, block: tuple[int, int]) -> Tensor:
    """True cells in each block; the matrix is padded with false ones up to whole blocks."""
    (rows, columns), (tall, wide) = cells.shape, block
    padded = functional.pad(cells, (0, -columns % wide, 0, -rows % tall))
    return padded.unflatten(1, (-1, wide)).unflatten(0, (-1, tall)).sum(dim=(1, 3)).float()
