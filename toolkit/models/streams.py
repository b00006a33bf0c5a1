"""Windows of text on their way through a decoder, all of them through one block before the next one is read.

    with closing(open_stream(model, windows)) as stream:
        for block in decoder_blocks(model):
            stream.calls      # run this block, one a window, for whatever is to be seen of it
            stream.advance()

So a caller can change a block before later ones see what it gives, and a model that is larger than memory is read once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from greenlet import getcurrent, greenlet
from jaxtyping import Int64
from torch import Tensor, nn

from toolkit.models.blocks import decoder_blocks
from toolkit.models.cutting import attached
from toolkit.models.on_demand import is_on_demand, present
from toolkit.progress import progress

Call = partial  # runs one block on one window
Run = Callable[[nn.Module, Int64[Tensor, " tokens"]], object]  # a pass of a model over a window
Arguments = list[tuple[tuple, dict[str, Any]]]
_known_arguments: "WeakKeyDictionary[nn.Module, dict[int, list | None]]" = WeakKeyDictionary()


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


def run_in_step(model: nn.Module, passes: Iterable[Callable[[], object]], title: str = "running the model") -> list:
    """The results of calls that run a model once each; all run a block before the next one is read."""
    blocks = decoder_blocks(model)
    with closing(Passes(model, passes)) as stream, progress(title, len(blocks), "blocks") as bar:
        for block in blocks:
            with present(block):
                stream.advance()
            bar.update()
        return stream.results


def run_decoder(model: nn.Module, window: Int64[Tensor, " tokens"]) -> None:
    """Run the decoder over one window, without the head."""
    model.base_model(window[None].to(model.device), use_cache=False)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, which turns dropout off. The model's own mode is restored afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


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


def _first_inputs(model: nn.Module, first: nn.Module, windows: Tensor) -> Tensor:
    """The hidden states [windows, tokens, width] that enter the first block."""
    hidden = []
    with attached([first.register_forward_pre_hook(stop)]):
        for window in windows:
            try:
                run_decoder(model, window)
            except ReachedError as reached:
                hidden.extend(reached.args)
    return torch.cat(hidden)


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


def _shared(arguments: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of those arguments that blocks may fill for later ones: mappings to some tensors each."""
    for name, mapping in arguments.items():
        for key, tensors in mapping.items() if isinstance(mapping, MutableMapping) else ():
            if isinstance(tensors, tuple | list):
                yield from ((f"{name}/{key}/{place}", tensor) for place, tensor in enumerate(tensors))


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


class ReachedError(Exception):
    """Ends a forward pass at a module and carries that module's input."""


def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
    """A hook before a module: the pass ends there."""
    raise ReachedError(args[0])
