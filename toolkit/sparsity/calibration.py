"""The sequential walk: the inputs of each decoder block's linears, with every earlier block already changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from jaxtyping import Float, Int64
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.cutting import attached
from toolkit.progress import progress
from toolkit.quality import begun, load_tokens, token_ids
from toolkit.quality.vocabulary import check_vocabulary

Statistic = Float[Tensor, "columns columns"] | Float[Tensor, " columns"]  # XᵀX of a linear's inputs X, or its diagonal

TILE = 1024  # columns of a Gram matrix that are summed at once


@dataclass(frozen=True)
class Calibration:
    """The text that a model is calibrated on: windows of a text, drawn at random and without overlap."""

    corpus: str = "wiki-slice"
    """As `load_tokens` takes it."""
    windows: int | None = None
    """How many are drawn; None for all there are. The papers take 128."""
    sequence_length: int = 1024
    """Tokens in a window."""
    seed: int = 0
    """Seeds the draw."""

    def draw(self, tokens: object) -> Int64[Tensor, "windows tokens"]:
        """Draw the windows from a row of token ids. Raises `UserError` as `cut_windows` does."""
        asked = len(cut_windows(tokens, self.windows, self.sequence_length))
        every = cut_windows(tokens, None, self.sequence_length)
        order = torch.randperm(len(every), generator=torch.Generator().manual_seed(self.seed))
        return every[order[:asked]]

    def draw_from_corpus(self, tokenizer: object) -> Int64[Tensor, "windows tokens"]:
        """Draw the windows from the corpus. Raises `UserError` as `load_tokens` and `draw` do."""
        return self.draw(load_tokens(self.corpus, tokenizer, "calibration"))


DEFAULT = Calibration()


def cut_windows(tokens: object, windows: int | None, sequence_length: int) -> Int64[Tensor, "windows tokens"]:
    """Cut the first `windows` windows from a row of token ids of any integer type; None cuts all that fit.

    Raises `UserError` if there are too few tokens, or tokens or numbers are of the wrong kind.
    """
    tokens = token_ids(tokens, "calibration")
    for label, value in {"windows": windows, "sequence_length": sequence_length}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
            raise UserError(f"{label} is {value!r}; expected a whole number, at least 1")
    windows = max(len(tokens) // sequence_length, 1) if windows is None else windows
    if len(tokens) < windows * sequence_length:
        raise UserError(
            f"calibration has {len(tokens)} tokens, {windows} windows of {sequence_length} need "
            f"{windows * sequence_length}; ask for fewer windows or give more text"
        )
    return tokens[: windows * sequence_length].reshape(windows, sequence_length)


def checked_windows(model: nn.Module, windows: object) -> Int64[Tensor, "windows tokens"]:
    """Windows of token ids of any integer type as int64, begun as the model expects (`toolkit.quality.begun`).

    Raises `UserError` for what the model cannot take.
    """
    if not isinstance(windows, Tensor) or windows.ndim != 2 or not windows.numel():
        what = f"{windows.dtype} {list(windows.shape)}" if isinstance(windows, Tensor) else type(windows).__name__
        raise UserError(f"calibration is {what}; expected token ids [windows, tokens], as cut_windows makes them")
    known = token_ids(windows.flatten(), "calibration").view(windows.shape)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", windows.shape[1])
    if 0 < positions < windows.shape[1]:  # some configurations say -1: no limit
        raise UserError(f"sequence_length {windows.shape[1]} is beyond the model's {positions} positions")
    check_vocabulary(known, model.get_input_embeddings().num_embeddings)
    return begun(model.config, known)


def check_finite(model: nn.Module) -> None:
    """Raise `UserError` for a decoder linear with weights that are not finite."""
    names = {module: name for name, module in model.named_modules()}
    for block in decoder_blocks(model):
        for linear in decoder_linears(block).values():
            if not linear.weight.isfinite().all():
                raise UserError(f"{names[linear]} has weights that are not finite; load the model anew")


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, which turns dropout off. The model's own mode is restored afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


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
    windows' hidden states (overwritten in place) and one block's Gram matrices are held, unless blocks take other
    arguments that differ by window (`_suspended_calls`). Raises `UserError` if an input is not finite. A linear that no
    token reaches (an expert, or one whose weight is used otherwise) has inputs that all count alike.
    """
    blocks = decoder_blocks(model)
    for index, (block, calls) in enumerate(zip(blocks, _block_calls(model, blocks, windows), strict=True)):
        if index >= first:
            linears = decoder_linears(block)
            with recorded_grams(linears, norms_only) as grams:
                _run_to_last(calls, linears.values())
            for name in linears.keys() - grams.keys():  # an expert that no token chose, or a weight used otherwise
                columns = linears[name].in_features  # all inputs count alike
                grams[name] = torch.ones(columns) if norms_only else torch.eye(columns)
            _check(grams, f"block {index}", model.dtype)
            yield block, grams
            grams.clear()  # the caller holds the dictionary until the next block is there


@torch.no_grad()
def head_gram(model: nn.Module, windows: Int64[Tensor, "windows tokens"]) -> Float[Tensor, "columns columns"]:
    """XᵀX of the output head's inputs X over all windows, float32. Raises `UserError` as `walk` does."""
    windows = checked_windows(model, windows)
    recorded = recorded_grams({"head": model.get_output_embeddings()})
    with inference(model), recorded as grams, progress("inputs of the head", len(windows), "windows") as bar:
        for window in windows:
            model(window[None].to(model.device), use_cache=False)
            bar.update()
    _check(grams, "output", model.dtype)
    return grams["head"]


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
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        columns = rows.shape[1]
        if name not in grams:
            grams[name] = rows.new_zeros([columns] * (1 if norms_only else 2))
        if norms_only:
            grams[name] += rows.square().sum(0)
        else:
            for start in range(0, columns, TILE):
                tile, rest = slice(start, start + TILE), slice(start, None)
                grams[name][tile, rest].addmm_(rows[:, tile].T, rows[:, rest])
        last = (inputs, name)

    with attached(linear.register_forward_pre_hook(partial(add, name)) for name, linear in linears.items()):
        yield grams
    for gram in {id(gram): gram for gram in grams.values() if gram.ndim == 2}.values():
        _mirror(gram)


def _mirror(gram: Float[Tensor, "columns columns"]) -> None:
    """Copy the tiles of the upper triangle to the lower one, in place."""
    for start in range(0, len(gram), TILE):
        tile, rest = slice(start, start + TILE), slice(start + TILE, None)
        gram[rest, tile] = gram[tile, rest].T


Call = Callable[[], object]  # runs one block on one window


def _block_calls(model: nn.Module, blocks: nn.ModuleList, windows: Tensor) -> Iterator[list[Call]]:
    """For each block in order, the calls that run it, one a window. Earlier blocks run first, as they are by then."""
    arguments, others = (_arguments(model, blocks, tokens) for tokens in (windows[0], _other(model, windows[0])))
    shared = all(_equal(*pair) for pair in zip(arguments, others, strict=True))
    return _shared_calls(model, blocks, windows, arguments) if shared else _suspended_calls(model, blocks, windows)


def _other(model: nn.Module, window: Int64[Tensor, " tokens"]) -> Int64[Tensor, " tokens"]:
    """A window without a token in its old place."""
    return (window + 1) % model.get_input_embeddings().num_embeddings


def _arguments(model: nn.Module, blocks: nn.ModuleList, window: Tensor) -> list[tuple[tuple, dict[str, Any]]]:
    """The arguments of each block beside the hidden states, which are the first one."""
    arguments = []
    record = lambda _, args, kwargs: arguments.append((args[1:], kwargs))  # noqa: E731
    with attached(block.register_forward_pre_hook(record, with_kwargs=True) for block in blocks):
        run_decoder(model, window)
    return arguments


def _equal(one: object, other: object) -> bool:
    """Whether two arguments have equal values. Objects that cannot be compared differ."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and one == other)


def _shared_calls(
    model: nn.Module, blocks: nn.ModuleList, windows: Tensor, arguments: list[tuple[tuple, dict[str, Any]]]
) -> Iterator[list[Call]]:
    """As `_block_calls`, for blocks whose arguments (positions, mask) are those of any other window.

    Only the hidden states are held, and overwritten by each block.
    """
    hidden = _first_inputs(model, blocks[0], windows)
    for block, (args, kwargs) in zip(blocks, arguments, strict=True):
        calls = [partial(block, window, *args, **kwargs) for window in hidden.split(1)]
        yield calls
        if block is not blocks[-1]:
            for window, call in zip(hidden.split(1), calls, strict=True):
                output = call()
                window.copy_(output[0] if isinstance(output, tuple) else output)


def _suspended_calls(model: nn.Module, blocks: nn.ModuleList, windows: Tensor) -> Iterator[list[Call]]:
    """As `_block_calls`, for blocks with arguments of each window: its tokens, or outputs of earlier blocks.

    One pass of the decoder a window stands still before each block, so the model itself makes the arguments. A pass
    also holds the embedding of its window, and its masks.
    """
    passes: list[greenlet] = []

    def stand_still(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if getcurrent() in passes:  # else the caller runs the block for its statistics
            getcurrent().parent.switch((args, kwargs))

    with attached(block.register_forward_pre_hook(stand_still, with_kwargs=True) for block in blocks):
        passes.extend(greenlet(partial(run_decoder, model, window)) for window in windows)
        try:
            for block in blocks:
                yield [partial(block, *args, **kwargs) for args, kwargs in [each.switch() for each in passes]]
        finally:
            for each in passes:
                each.throw()


class _ReachedError(Exception):
    """Ends a forward pass at a module and carries that module's input."""


def _stop(_: nn.Module, args: tuple[Any, ...]) -> None:
    raise _ReachedError(args[0])


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
    with attached(linear.register_forward_pre_hook(_stop) for linear in last):
        for call in others:
            with suppress(_ReachedError):
                call()


def _first_inputs(model: nn.Module, first: nn.Module, windows: Tensor) -> Tensor:
    """The hidden states [windows, tokens, width] that enter the first block."""
    hidden = []
    with attached([first.register_forward_pre_hook(_stop)]):
        for window in windows:
            try:
                run_decoder(model, window)
            except _ReachedError as reached:
                hidden.extend(reached.args)
    return torch.cat(hidden)


def run_decoder(model: nn.Module, window: Int64[Tensor, " tokens"]) -> None:
    """Run the decoder over one window, without the head."""
    model.base_model(window[None].to(model.device), use_cache=False)


def _check(grams: dict[str, Tensor], block: str, dtype: torch.dtype) -> None:
    for name, gram in grams.items():
        if not (gram.diagonal() if gram.ndim == 2 else gram).isfinite().all():
            raise UserError(f"{block}: inputs of {name} are not finite in {dtype}; load it in bfloat16 or float32")
