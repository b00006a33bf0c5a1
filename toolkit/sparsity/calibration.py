"""The sequential walk: the inputs of each decoder block's linears, with every earlier block already changed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary

import torch
from greenlet import getcurrent, greenlet
from jaxtyping import Float, Int64
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.cutting import attached
from toolkit.models.on_demand import is_on_demand, present
from toolkit.progress import progress
from toolkit.quality import begun, load_tokens, token_ids
from toolkit.vocabulary import check_vocabulary

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
        with present(block):
            check_finite_block(block, names)


def check_finite_block(block: nn.Module, names: Mapping[nn.Module, str]) -> None:
    """The same for one block. `names` are those of the model's modules."""
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
    block: nn.Module, calls: list["Call"], norms_only: bool, name: str, dtype: torch.dtype
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


def gram_of_head(model: nn.Module, inputs: Iterable[Tensor]) -> Float[Tensor, "columns columns"]:
    """XᵀX of the output head's inputs X, float32. Raises `UserError` if they are not finite."""
    first, *others = inputs
    gram = _added(None, first, norms_only=False)
    for one in others:
        _added(gram, one, norms_only=False)
    _mirror(gram)
    _check({"head": gram}, "output", model.dtype)
    return gram


def _head_inputs(model: nn.Module, window: Int64[Tensor, " tokens"]) -> Tensor:
    """The head's inputs. The head itself does not run."""
    with attached([model.get_output_embeddings().register_forward_pre_hook(_stop)]):
        try:
            model(window[None].to(model.device), use_cache=False)
        except _ReachedError as reached:
            return reached.args[0]
    raise UserError(f"{type(model).__name__} does not run its head")


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


Call = partial  # runs one block on one window


class Stream(ABC):
    """Windows of text on their way through a decoder. All stand before the same block."""

    @property
    @abstractmethod
    def calls(self) -> list[Call]:
        """The calls that run this block, one a window."""

    @abstractmethod
    def advance(self) -> None:
        """Run this block, as it is now, on each window: all stand before the next one."""

    @property
    @abstractmethod
    def results(self) -> list:
        """The result of each window's pass, once the last block has run."""

    @property
    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that `restore` needs in another process."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor], number: int) -> None:
        """Stand before block `number`."""

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Let go of what it holds."""


Run = Callable[[nn.Module, Int64[Tensor, " tokens"]], object]  # a pass of a model over a window
_known_arguments: "WeakKeyDictionary[nn.Module, dict[int, list | None]]" = WeakKeyDictionary()


def open_stream(model: nn.Module, windows: Int64[Tensor, "windows tokens"], run: Run | None = None) -> Stream:
    """The windows before the first block; `run` makes a pass of each, through the decoder alone if it is None.

    Only hidden states are held, unless blocks take other arguments that differ by window (`Passes`).
    """
    run, length = run or run_decoder, windows.shape[1]
    known = _known_arguments.setdefault(model, {}) if is_on_demand(model) else {}  # others may change meanwhile
    if length not in known:
        known[length] = _shared_arguments(model, windows[0])
    if known[length] is None:
        return Passes(model, [partial(run, model, window) for window in windows])
    return HiddenStates(model, windows, known[length], run)


Arguments = list[tuple[tuple, dict[str, Any]]]


def _shared_arguments(model: nn.Module, window: Int64[Tensor, " tokens"]) -> Arguments | None:
    """The arguments of each block beside the hidden states; None if they differ by window.

    Only the first block runs, which shows what blocks give: what enters a block is no matter here.
    """
    arguments: Arguments = []
    pair, blocks = (window, _other(model, window)), decoder_blocks(model)
    passes = Passes(model, [partial(run_decoder, model, each) for each in pair])
    with closing(passes), _skipped(blocks[1:], lambda: passes.output):
        for block in blocks:
            one, other = passes.calls
            if not _equal([one.args[1:], one.keywords], [other.args[1:], other.keywords]):
                return None
            arguments.append((one.args[1:], one.keywords))
            with present(block) if block is blocks[0] else nullcontext():
                passes.advance()
    return arguments


class HiddenStates(Stream):
    """A stream through blocks whose arguments (positions, mask) are those of any other window.

    Only the hidden states are held, and overwritten by each block.
    """

    def __init__(self, model: nn.Module, windows: Tensor, arguments: Arguments, run: Run):
        self._model, self._windows, self._run = model, windows, run
        self._blocks, self._arguments, self._number = decoder_blocks(model), arguments, 0
        self._hidden, self._several = _first_inputs(model, self._blocks[0], windows), False

    @property
    def calls(self) -> list[Call]:
        """The calls of this block."""
        block, (args, kwargs) = self._blocks[self._number], self._arguments[self._number]
        return [partial(block, window, *args, **kwargs) for window in self._hidden.split(1)]

    def advance(self) -> None:
        """Run this block."""
        for window, call in zip(self._hidden.split(1), self.calls, strict=True):
            output = call()
            self._several = isinstance(output, tuple | list)
            window.copy_(output[0] if self._several else output)
        self._number += 1

    @property
    def results(self) -> list:
        """The results of passes whose last block gave the hidden states."""
        return [self._result(*pair) for pair in zip(self._windows, self._hidden.split(1), strict=True)]

    def _result(self, window: Tensor, hidden: Tensor) -> object:
        with _skipped(self._blocks, lambda: (hidden,) if self._several else hidden):
            return self._run(self._model, window)

    @property
    def state(self) -> dict[str, Tensor]:
        """The hidden states."""
        return {"hidden": self._hidden, "several": torch.tensor(self._several)}

    def restore(self, state: Mapping[str, Tensor], number: int) -> None:
        """Put hidden states before a block."""
        self._hidden, self._several, self._number = state["hidden"].clone(), bool(state["several"]), number


@contextmanager
def _skipped(blocks: Iterable[nn.Module], output: Callable[[], object]) -> Iterator[None]:
    """Inside the block, decoder blocks do not run: they give this output."""
    own = {block: vars(block).get("forward") for block in blocks}
    for block in own:
        block.forward = lambda *_, **__: output()
    try:
        yield
    finally:
        for block, forward in own.items():
            del block.forward
            if forward is not None:
                block.forward = forward


class Passes(Stream):
    """Several passes of a model, each any call that runs it once, which stand still before each block.

    So the model itself makes the arguments of its blocks. A pass also holds the embedding of its window, and its masks.
    """

    def __init__(self, model: nn.Module, passes: Iterable[Callable[[], object]]):
        self._blocks, self._number, self._passes = decoder_blocks(model), -1, []
        self._outputs: dict[greenlet, object] = {}  # of the latest block that each pass has run
        hooks = (block.register_forward_pre_hook(self._stand_still, with_kwargs=True) for block in self._blocks)
        self._hooks = [*hooks, *(block.register_forward_hook(self._note) for block in self._blocks)]
        self._calls = list(passes)
        self._passes.extend(map(greenlet, self._calls))
        self.advance()

    @property
    def calls(self) -> list[Call]:
        """The calls of this block."""
        return [partial(self._blocks[self._number], *args, **kwargs) for args, kwargs in self._standing]

    def advance(self) -> None:
        """Run this block; the last one also runs the rest of each pass."""
        self._standing = [each.switch() for each in self._passes]
        self._number += 1

    @property
    def results(self) -> list:
        """The results of the calls."""
        return self._standing

    @property
    def output(self) -> object:
        """The output of the latest block that the running pass has run."""
        return self._outputs[getcurrent()]

    @property
    def state(self) -> dict[str, Tensor]:
        """Each pass's hidden states, and what its blocks leave for later ones: keys and values in Gemma 3n."""
        state: dict[str, Tensor] = {}
        for number, (each, standing) in enumerate(zip(self._passes, self._standing, strict=True)):
            output = self._outputs[each]
            several = isinstance(output, tuple | list)
            state |= {f"{number}/hidden": output[0] if several else output, "several": torch.tensor(several)}
            if self._number < len(self._blocks):
                state |= {f"{number}/{name}": tensor for name, tensor in _shared(standing[1])}
        return state

    def restore(self, state: Mapping[str, Tensor], number: int) -> None:
        """Stand before a block: the passes begin again, and run without the blocks before it."""
        self._end()
        self._number, self._passes[:] = -1, map(greenlet, self._calls)
        hidden = {each: state[f"{place}/hidden"].clone() for place, each in enumerate(self._passes)}
        several = bool(state["several"])
        output = lambda: (hidden[getcurrent()],) if several else hidden[getcurrent()]  # noqa: E731
        with _skipped(self._blocks[:number], output):
            for _ in range(number + 1):
                self.advance()
        shared = sorted(name.split("/") for name in state if name.count("/") == 3)
        for (place, argument, key), names in groupby(shared, key=lambda path: path[:3]):
            self._standing[int(place)][1][argument][key] = tuple(state["/".join(path)].clone() for path in names)

    def close(self) -> None:
        """End the passes where they stand."""
        for hook in self._hooks:
            hook.remove()
        self._end()

    def _end(self) -> None:
        for each in self._passes:
            each.throw()

    def _note(self, _: nn.Module, __: tuple, output: object) -> None:
        if getcurrent() in self._passes:
            self._outputs[getcurrent()] = output

    def _stand_still(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if getcurrent() in self._passes:  # else the caller runs the block for its statistics
            getcurrent().parent.switch((args, kwargs))


def _shared(arguments: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of those arguments that blocks may fill for later ones: mappings to some tensors each."""
    for name, mapping in arguments.items():
        for key, tensors in mapping.items() if isinstance(mapping, MutableMapping) else ():
            if isinstance(tensors, tuple | list):
                yield from ((f"{name}/{key}/{place}", tensor) for place, tensor in enumerate(tensors))


def head_stream(model: nn.Module, windows: Int64[Tensor, "windows tokens"]) -> Stream:
    """The windows on their way to the head, whose inputs are the results."""
    return open_stream(model, checked_windows(model, windows), _head_inputs)


def run_in_step(model: nn.Module, passes: Iterable[Callable[[], object]], title: str = "running the model") -> list:
    """The results of calls that run a model once each; all run a block before the next one is read."""
    blocks = decoder_blocks(model)
    with closing(Passes(model, passes)) as stream, progress(title, len(blocks), "blocks") as bar:
        for block in blocks:
            with present(block):
                stream.advance()
            bar.update()
        return stream.results


def _other(model: nn.Module, window: Int64[Tensor, " tokens"]) -> Int64[Tensor, " tokens"]:
    """A window without a token in its old place."""
    return (window + 1) % model.get_input_embeddings().num_embeddings


def _equal(one: object, other: object) -> bool:
    """Whether two arguments have equal values. Objects that cannot be compared, or that blocks may fill, differ."""
    if isinstance(one, MutableMapping) and not isinstance(one, dict):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and one == other)


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
