"""`toolkit.perplexity`: the quality of a model on text."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import memory_limits
from toolkit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from toolkit.offload.decoder.opened_file import OpenedFile
    from toolkit.offload.model import OffloadedModel
    from toolkit.quality import Perplexity

LOGIT_BYTES = 10  # of a word at a position: in the model's type, and copies in float32


def perplexity(
    model: "nn.Module | OffloadedModel | OpenedFile | str | Path",
    text: "Tensor | object | None" = None,
    sequence_length: int = 512,
    windows: int | None = 4,
    corpus: str = "wiki-slice",
    memory: float | str | None = None,
) -> "Perplexity":
    """The perplexity of a model on text that calibration does not see: a float that knows its conditions.

    A model that is read from disk takes all windows through one decoder block before it reads the next one.

    Args:
        model: a causal language model of transformers, or what `open` gives. Or a place that this call opens: a folder
            that `pack` wrote, a model's name, a folder, a GGUF file, or an id on the hub.
        text: a tokenizer, which reads the evaluation part of `corpus`; or token ids, integers [tokens] of torch, NumPy
            or a list. None takes the tokenizer of the place.
        sequence_length: tokens of a window, each read from a blank context, as GPTQ counts. Perplexities of different
            lengths must not be compared.
        windows: the first so many; None takes all. Few windows make the error large: see `.standard_error`.
        corpus: "wiki-slice", "python-sources", "wikitext-2" or "c4".
        memory: of a place alone: by so much the process may grow while it is evaluated.

    Raises `UserError` for too little text, for a sequence that is longer than the model's positions, and for memory
    that is too small.
    """
    from torch import from_numpy

    from toolkit import quality
    from toolkit.offload.decoder.opened_file import OpenedFile

    if isinstance(model, str | Path):
        with _opened(Path(model), sequence_length, memory) as (place, tokenizer):
            return perplexity(place, tokenizer if text is None else text, sequence_length, windows, corpus)
    if memory is not None:
        raise UserError(f"memory={memory}: the model is open already; give its place, or its limit to open")
    if text is None:
        raise UserError("a model in memory needs text: pass its tokenizer, or token ids")
    tokens = quality.load_tokens(corpus, text, "evaluation") if callable(text) else _ids(text)
    if isinstance(model, OpenedFile):
        from toolkit.models.gguf_config import config_of

        scores = lambda window: from_numpy(model.scores(window.tolist()))  # noqa: E731
        return quality.perplexity_of(scores, config_of(model.file.header), tokens, sequence_length, windows)
    settings = {} if (run := in_step(model)) is None else {"run": run}
    whole = model.model if _is_offloaded(model) else model
    return quality.perplexity(whole, tokens, sequence_length, windows, **settings)


def _ids(text: object) -> "Tensor":
    """Token ids [tokens]. Raises `UserError` for what holds none."""
    from torch import as_tensor

    try:
        if isinstance(text, str):
            raise ValueError
        return as_tensor(text)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"text of type {type(text).__name__}: expected a tokenizer, or token ids") from None


def in_step(model: "nn.Module | OffloadedModel") -> Callable[[Sequence[Callable]], list] | None:
    """Runs calls of a model that is read from disk, all through one block before the next; None for another model."""
    from toolkit.models.on_demand import is_on_demand
    from toolkit.models.streams import run_in_step

    if _is_offloaded(model):
        return partial(run_in_step, model.model, title="evaluating")
    return partial(run_in_step, model, title="evaluating") if is_on_demand(model) else None


def _is_offloaded(model: object) -> bool:
    from toolkit.offload.model import OffloadedModel

    return isinstance(model, OffloadedModel)


@contextmanager
def _opened(place: Path, length: int, memory: float | str | None) -> Iterator[tuple]:
    """The model of a place and its tokenizer. Logits of a window are taken off the memory first."""
    from toolkit.api.opening import open
    from toolkit.models.loading import load_model, read_config

    if (place / "index.json").is_file():
        from toolkit.storage.store import Store

        words = Store.open(place).config().get_text_config().vocab_size
        limit = _without(memory, LOGIT_BYTES * length * words)
        with open(place, memory=limit, context=length) as model:
            yield model, model.tokenizer
        return
    words = read_config(str(place)).get_text_config().vocab_size
    yield load_model(str(place), memory=_without(memory, LOGIT_BYTES * length * words))


def _without(memory: float | str | None, nbytes: int) -> int | None:
    """A limit without these bytes. Raises `UserError` if nothing is left."""
    limit = memory_limits.bytes_of("memory", memory)
    if limit is not None and limit <= nbytes:
        raise UserError(
            f"memory={memory}: logits of a window take {nbytes / 1e6:.0f} MB; give more, or shorter windows"
        )
    return None if limit is None else limit - nbytes
