"""The options of memory of `run`, `chat` and `serve`; `toolkit.offload.overhead` works out the budget of weights.

`python -m toolkit.commands.memory [FILE.gguf [without-torch]]` prints the bytes that `run` holds before it opens a
model: its imports, and the tokenizer of a file. Plans need them.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit import memory_limits
from toolkit.errors import UserError

WITHOUT_TORCH = "without-torch"


@contextmanager
def dram_within(coming, most: int, asked: int | None, memory_bytes: int | None, on_cpu: bool = True) -> Iterator[int]:
    """The budget of DRAM that the process's limit leaves, or free memory if there is none.

    `coming` is an `Overhead`, `most` bounds what weights and buffers can take, `asked` is the user's own budget. Raises
    `BudgetError` where the process would take more than there is. Inside the block, a budget that is too small because
    the process's limit leaves no more becomes an error about that limit.
    """
    from toolkit.offload.overhead import ProcessLimit

    if memory_bytes is None:
        with _within_free(coming, most, asked, on_cpu) as dram_bytes:
            yield dram_bytes
    else:
        limit = ProcessLimit.now(memory_bytes, coming)
        with limit.explained():
            yield limit.budget(asked)


@contextmanager
def _within_free(coming, most: int, asked: int | None, on_cpu: bool) -> Iterator[int]:
    """The budget of DRAM within what is free; a line says what the process will take."""
    from toolkit.offload.budget import BudgetError
    from toolkit.offload.overhead import budget_within

    memory_limits.trim()
    present, dram_bytes = memory_limits.anonymous_bytes(), budget_within(asked, most, coming)
    weights = min(dram_bytes, most) if on_cpu else dram_bytes
    beside = present + coming.nbytes - coming.code
    print(
        f"the process will take up to {(beside + weights) / 1e6:.0f} MB of memory, without files: {beside / 1e6:.0f} "
        "MB of them beside weights and their buffers",
        file=sys.stderr,
    )
    try:
        yield dram_bytes
    except BudgetError as error:
        if asked is not None or error.needed_bytes <= dram_bytes:
            raise
        least = (coming.nbytes + error.needed_bytes - dram_bytes) / 1e6
        raise BudgetError(
            f"{memory_limits.free_bytes() / 1e6:.0f} MB of memory are free, and this model takes {least:.0f} MB more "
            f"beside what the process has: {error}",
            error.needed_bytes,
        ) from error


def check_context(options: Namespace, prompt: int) -> None:
    """Raise `UserError` for a `--context` that is shorter than a prompt of so many tokens and its text."""
    if options.context is not None and prompt + options.max_new_tokens > options.context:
        raise UserError(
            f"--context {options.context}: the prompt has {prompt} tokens, and {options.max_new_tokens} are to follow: "
            f"expected {prompt + options.max_new_tokens} or more"
        )


def _print_present(file: str | None = None, way: str = "") -> None:
    """Print the bytes that this process holds after the imports of `run`."""
    memory_limits.return_large_blocks()
    held = _without_torch(Path(file)) if file and way == WITHOUT_TORCH else _with_torch(file)
    memory_limits.trim()
    print(memory_limits.anonymous_bytes())
    del held


def _with_torch(file: str | None) -> object:
    """Import as `opening` does for a folder."""
    from toolkit import hub

    with hub.lean():
        from toolkit.interchange.reading import load_tokenizer
        from toolkit.offload.model import OffloadedModel

        return OffloadedModel, load_tokenizer(Path(file)) if file else None


def _without_torch(file: Path) -> object:
    """Import as `opening` does for a file."""
    from toolkit import hub

    with hub.standing_in({"scipy": None}):
        from toolkit.offload.decoder.model_file import ModelFile

        return ModelFile.of(file)


if __name__ == "__main__":
    _print_present(*sys.argv[1:])
