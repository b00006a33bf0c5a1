"""The model that a command's options name, open within their limits: the one way of `run`, `chat` and `serve`.

    with opened(options, kind, lambda source: TextRoom(prompt=512)) as model:
        for piece in model.writer(context=512).continued(tokens, Request()):
            ...

A GGUF file whose architecture the decoder knows runs without torch and transformers: a `ModelFile`. All else is a model
of transformers: a `Folder`. Both say what memory is needed before weights are read.
"""

import gc
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit import downloads, hub, memory_limits
from toolkit.commands.folder import Folder
from toolkit.commands.kv_type import add_kv_type
from toolkit.commands.memory import dram_within
from toolkit.errors import UserError, whole
from toolkit.memory_limits import bytes_of
from toolkit.offload.overhead import Overhead, TextRoom
from toolkit.offload.text_model import TextModel
from toolkit.offload.variant import GGUF, no_kv_type, variant_to_run

if TYPE_CHECKING:
    from toolkit.offload.generation import Writer

CONTEXT = 2048  # tokens of prompt and answers, unless the model has fewer positions
# options of `run` that others do not have
DEFAULTS = dict.fromkeys(("weights", "draft", "draft_tokens", "reader", "residency", "neurons", "device_memory"))
DEFAULTS |= {"policy": "pipelined", "device": "cpu", "verify": True}
DECODER = {"weights": (None, "packed"), "reader": (None, "aio", "threads")}  # values that it takes


class ModelSource(Protocol):
    """A model before its weights are read."""

    @property
    def tokenizer(self) -> Any:
        """As those of transformers."""

    @property
    def words(self) -> int:
        """The size of the vocabulary."""

    @property
    def positions(self) -> int | None:
        """How many tokens the model knows positions for, if anything says so."""

    @property
    def most_bytes(self) -> int:
        """A bound of what weights and buffers can take."""

    def kernels(self, room: TextRoom) -> str:
        """A name for the compiled functions that a text of this room needs."""

    def overhead(self, room: TextRoom, compiles: bool) -> Overhead:
        """The memory beside weights and buffers; `compiles`: no compiled functions are kept."""

    def open(self, dram_bytes: int, room: TextRoom) -> AbstractContextManager[Any]:
        """The model within a budget of DRAM."""

    def text_model(self, model: Any) -> TextModel:
        """The opened model as a `TextModel`."""

    def settings_of(self, model: Any) -> tuple[Any, ...]:
        """The settings that name the tokens that end the opened model's texts, as `eos_token_id`."""


@dataclass(frozen=True)
class Opened:
    """A model that writes texts, the largest memory of the process so far, and its limit in bytes, if one was given."""

    model: Any
    source: ModelSource
    peak: memory_limits.Peak
    limit: int | None

    def writer(self, context: int, in_turns: bool = False, **settings: Any) -> "Writer":
        """A writer of texts of up to `context` tokens. `in_turns`: the chat template's end of a turn ends one, too.

        `settings` go to `Writer`.
        """
        from toolkit.offload.chat_template import ends_of, named_ends
        from toolkit.offload.generation import Writer

        tokenizer, named = self.source.tokenizer, self.source.settings_of(self.model)
        ends = ends_of(tokenizer, *named) if in_turns else named_ends(named[0])
        return Writer(self.source.text_model(self.model), tokenizer, ends, context, **settings)

    def memory(self) -> str:
        """The peak, in words."""
        took = f"{self.peak.look() / 1e6:.0f}"
        return f"peak {took} MB" if self.limit is None else f"peak {took} of {self.limit / 1e6:.0f} MB"


@contextmanager
def opened(
    options: Namespace, kind: str, room_of: Callable[[ModelSource], TextRoom], timed: bool = False
) -> Iterator[Opened]:
    """The model at `options.folder`, of this kind. Without `--memory` a line says what the process will take.

    `timed`: the timeline of all passes stays, for one text. Raises `UserError` before weights are read if the limits do
    not allow for the room.
    """
    limits = {name: bytes_of(f"--{name}", getattr(options, name)) for name in ("memory", "dram")}
    with ExitStack() as stack:
        peak = stack.enter_context(followed_process())
        with collector_paused(), hub.standing_in({"scipy": None}):  # which Numba imports
            from toolkit.kernels.engine import compiled

            source = _file(options, timed) or _folder(options, kind, stack)
            room = room_of(source)
            coming = source.overhead(room, not compiled.ran_before(source.kernels(room)))
            within = dram_within(coming, source.most_bytes, limits["dram"], limits["memory"], options.device == "cpu")
            with within as dram_bytes:
                model = stack.enter_context(source.open(dram_bytes, room))
        yield Opened(model, source, peak, limits["memory"])
        compiled.note_run(source.kernels(room))


def _file(options: Namespace, timed: bool) -> ModelSource | None:
    """The model of a file that the decoder takes with these options."""
    if not options.folder.is_file() or any(getattr(options, name) not in taken for name, taken in DECODER.items()):
        return None
    from toolkit.offload.decoder.drafted_file import DraftedFile
    from toolkit.offload.decoder.model_file import ModelFile

    settings = {name: getattr(options, name) for name in ("policy", "reader", "residency")}
    file = ModelFile.of(options.folder, options.kv_type, timed=timed, **settings)
    if file is None or options.draft is None:
        return file
    draft = ModelFile.of(options.draft, options.kv_type) if options.draft.is_file() else None
    return draft and DraftedFile.beside(file, draft, options.draft_tokens)


def _folder(options: Namespace, kind: str, stack: ExitStack) -> Folder:
    if options.kv_type is not None:
        raise no_kv_type(options.folder, options.kv_type)
    stack.enter_context(hub.lean())  # before anything imports transformers' models
    return Folder(options, kind, stack)


def add_model_options(parser: ArgumentParser) -> None:
    """Add the options of commands that answer: the model, its limits, and the tokens that it may hold."""
    parser.set_defaults(**DEFAULTS)
    parser.add_argument("folder", type=Path, help="what pack wrote, a GGUF file, or the name of one that is downloaded")
    memory = "hard limit for all that the process takes, such as 1GB: libraries, weights, buffers, key-value cache"
    parser.add_argument("--memory", help=f"{memory} (default: most of what is free)")
    parser.add_argument("--dram", help="hard limit for weights and buffers alone, such as 500MB")
    context = f"tokens that the model may hold at once (default: {CONTEXT}, or its positions if they are fewer)"
    parser.add_argument("--context", type=whole, help=context)
    add_kv_type(parser)


@contextmanager
def opened_to_answer(options: Namespace, scored: bool = False, **settings: Any) -> "Iterator[tuple[Opened, Writer]]":
    """The model that the options of `add_model_options` name, and what answers with it; `settings` go to `Writer`.

    `scored`: the tokens of a prompt may be scored, which takes memory.

    Raises `UserError` for a place without a model, a limit that is too small, and a context beyond its positions.
    """
    from toolkit.offload.generation import PASS

    def context_of(source: ModelSource) -> int:
        if options.context and source.positions and options.context > source.positions:
            known = f"expected {source.positions} at most, the positions that this model knows"
            raise UserError(f"--context {options.context}: {known}")
        return options.context or min(CONTEXT, source.positions or CONTEXT)

    options.folder = place_of(options.folder)
    if (kind := kind_of(options.folder)) == "checkpoint":
        raise UserError(f"{options.folder} is a checkpoint, which is loaded whole: pack it, and name what was packed")
    kind = kind_in(options.folder, kind)
    with opened(options, kind, lambda source: TextRoom(context_of(source), at_once=PASS, scored=scored)) as model:
        yield model, model.writer(context_of(model.source), in_turns=True, **settings)


def kind_of(place: Path, form: str | None = None) -> str:
    """The kind at a place: "checkpoint", "bundled" (neurons), "experts", or the format of its layers; "gguf" of files.

    Raises `UserError` for a place that nothing runs, or a format that it does not have.
    """
    if (place / "config.json").is_file() and not (place / "index.json").is_file():
        return "checkpoint"
    return variant_to_run(place, form)


def kind_in(place: Path, kind: str) -> str:
    """The same kind, but "experts" for a GGUF file with a mixture. Raises `UserError` for a file that is damaged."""
    if kind != GGUF:
        return kind
    with collector_paused():
        from toolkit.models.gguf_header import read_header

        return "experts" if any(".ffn_down_exps." in name for name in read_header(place).tensors) else GGUF


def place_of(place: Path) -> Path:
    """The GGUF file of a model that the toolkit knows by name, downloaded once; any other place as it is."""
    if place.exists() or str(place) not in downloads.of_kind(".gguf"):
        return place
    return downloads.fetch(str(place))


@contextmanager
def followed_process() -> Iterator[memory_limits.Peak]:
    """Inside the block the process's largest memory is followed, and large blocks that it frees go back to the system.

    At its end the garbage collector looks again at what `collector_paused` left out.
    """
    memory_limits.return_large_blocks()
    try:
        with memory_limits.Peak() as peak:
            yield peak
    finally:
        gc.unfreeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside the block the garbage collector is paused: imports make millions of objects that stay.

    The collector takes a quarter of the time to import torch and transformers. Afterwards it leaves these objects out,
    until `gc.unfreeze`.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()
