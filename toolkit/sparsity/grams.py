"""The sequential walk: the inputs of each decoder block's linears, with every earlier block already changed.

Inputs X are kept as their Gram matrix XᵀX, or as its diagonal.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.cutting import attached
from toolkit.models.on_demand import present
from toolkit.models.streams import Call, ReachedError, Stream, inference, open_stream, run_in_step, stop
from toolkit.sparsity.calibration import checked_windows

Statistic = Float[Tensor, "columns columns"] | Float[Tensor, " columns"]  # XᵀX of a linear's inputs X, or its diagonal
TILE = 1024  # columns of a Gram matrix that are summed at once


@torch.no_grad()
def walk(
    model: nn.Module,
    windows: Int64[Tensor, "windows tokens"],
    first: int = 0,
    norms_only: bool = False,
) -> Iterator[tuple[nn.Module, dict[str, Statistic]]]:
    """Yield each decoder block with the Gram matrix XᵀX of every linear in it, by the linear's name in the block.

    With `norms_only` it is the diagonal alone, which takes a thousandth of the products.

    The caller prunes or quantises the block before it asks for the next one. The block then runs again, and its new
    outputs are the next block's inputs. Blocks before number `first` run as they are and are not yielded. Only the
    windows' hidden states and one block's Gram matrices are held (`open_stream`). Raises `UserError` if an input is not
    finite. A linear that no token reaches (an expert, or one whose weight is used otherwise) has inputs that all count
    alike.
    """
    blocks = decoder_blocks(model)
    with closing(open_stream(model, windows)) as stream:
        for index, block in enumerate(blocks):
            with present(block):
                if index >= first:
                    grams = statistics_of(block, stream.calls, norms_only, f"block {index}", model.dtype)
                    yield block, grams
                    grams.clear()  # the caller holds the dictionary until the next block is there
                if block is not blocks[-1]:
                    stream.advance()


def statistics_of(
    block: nn.Module, calls: list[Call], norms_only: bool, name: str, dtype: torch.dtype
) -> dict[str, Statistic]:
    """The statistics of the inputs of a block's linears, as `walk` gives them. The block is in memory."""
    linears = decoder_linears(block)
    with recorded_grams(linears, norms_only) as grams:
        _run_to_last(calls, linears.values())
    for linear in linears.keys() - grams.keys():  # an expert that no token chose, or a weight used otherwise
        columns = linears[linear].in_features  # all inputs count alike
        grams[linear] = torch.ones(columns) if norms_only else torch.eye(columns)
    _check(grams, name, dtype)
    return grams


@torch.no_grad()
def head_gram(model: nn.Module, windows: Int64[Tensor, "windows tokens"]) -> Float[Tensor, "columns columns"]:
    """XᵀX of the output head's inputs X over all windows, float32. Raises `UserError` as `walk` does."""
    windows = checked_windows(model, windows)
    passes = [partial(_head_inputs, model, window) for window in windows]
    with inference(model):
        return gram_of_head(model, run_in_step(model, passes, "inputs of the head"))


def head_stream(model: nn.Module, windows: Int64[Tensor, "windows tokens"]) -> Stream:
    """The windows on their way to the head, whose inputs are the results."""
    return open_stream(model, checked_windows(model, windows), _head_inputs)


def gram_of_head(model: nn.Module, inputs: Iterable[Tensor]) -> Float[Tensor, "columns columns"]:
    """XᵀX of the output head's inputs X, float32. Raises `UserError` if they are not finite."""
    first, *others = inputs
    gram = _added(None, first, norms_only=False)
    for one in others:
        _added(gram, one, norms_only=False)
    _mirror(gram)
    _check({"head": gram}, "output", model.dtype)
    return gram


@contextmanager
def recorded_grams(linears: dict[str, nn.Linear], norms_only: bool = False) -> Iterator[dict[str, Statistic]]:
    """Inside the block, add up XᵀX, or its diagonal, over all inputs of each linear, in float32.

    Gives the sums by the linear's name. Linears fed by the very same tensor (q, k and v; gate and up) share one sum.
    Tiles below the diagonal of XᵀX are copied from those above it when the block ends.
    """
    grams: dict[str, Tensor] = {}
    last: tuple[Tensor | None, str] = (None, "")  # kept alive, so that no later tensor gets the same identity

    def add(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal last
        (inputs,) = args
        if inputs is last[0]:
            grams[name] = grams[last[1]]
            return
        grams[name] = _added(grams.get(name), inputs, norms_only)
        last = (inputs, name)

    with attached(linear.register_forward_pre_hook(partial(add, name)) for name, linear in linears.items()):
        yield grams
    for gram in {id(gram): gram for gram in grams.values() if gram.ndim == 2}.values():
        _mirror(gram)


def _head_inputs(model: nn.Module, window: Int64[Tensor, " tokens"]) -> Tensor:
    """The head's inputs. The head itself does not run."""
    with attached([model.get_output_embeddings().register_forward_pre_hook(stop)]):
        try:
            model(window[None].to(model.device), use_cache=False)
        except ReachedError as reached:
            return reached.args[0]
    raise UserError(f"{type(model).__name__} does not run its head")


def _run_to_last(calls: list[Call], linears: Iterable[nn.Linear]) -> None:
    """Run a block for the inputs of its linears, up to the last one, whose product is not needed.

    The first window tells which one that is, since a block calls its linears in one order.
    """
    first, *others = calls
    called: list[nn.Module] = []
    record = lambda linear, _: called.append(linear)  # noqa: E731
    with attached(linear.register_forward_pre_hook(record) for linear in linears):
        first()
    last = [linear for linear in called[-1:] if called.count(linear) == 1]
    with attached(linear.register_forward_pre_hook(stop) for linear in last):
        for call in others:
            with suppress(ReachedError):
                call()


def _added(gram: Tensor | None, inputs: Float[Tensor, "*batch columns"], norms_only: bool) -> Tensor:
    """A sum of XᵀX, above the diagonal of tiles, or of its diagonal, with these inputs added in place."""
    rows = inputs.reshape(-1, inputs.shape[-1]).float()
    columns = rows.shape[1]
    if gram is None:
        gram = rows.new_zeros([columns] * (1 if norms_only else 2))
    if norms_only:
        gram += rows.square().sum(0)
    else:
        for start in range(0, columns, TILE):
            tile, rest = slice(start, start + TILE), slice(start, None)
            gram[tile, rest].addmm_(rows[:, tile].T, rows[:, rest])
    return gram


def _mirror(gram: Float[Tensor, "columns columns"]) -> None:
    """Copy the tiles of the upper triangle to the lower one, in place."""
    for start in range(0, len(gram), TILE):
        tile, rest = slice(start, start + TILE), slice(start + TILE, None)
        gram[rest, tile] = gram[tile, rest].T


def _check(grams: dict[str, Tensor], block: str, dtype: torch.dtype) -> None:
    for name, gram in grams.items():
        if not (gram.diagonal() if gram.ndim == 2 else gram).isfinite().all():
            raise UserError(f"{block}: inputs of {name} are not finite in {dtype}; load it in bfloat16 or float32")
