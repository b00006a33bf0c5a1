"""The memory that a process with a packed model may take: its budget of DRAM within the limit of its container."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from toolkit import memory_limits


@contextmanager
def within_limit(
    options: Namespace, tokenizer, what: str, budgets: Mapping[str, int | None], memory_bytes: int | None
) -> Iterator[dict[str, int | None]]:
    """The budgets with which a folder is opened inside the block; a line says what the process will take.

    `what` names the kernels that are used, `memory_bytes` is the limit for the process, if one is given. Raises
    `BudgetError` where the process would take more than there is. Inside the block, a budget that is too small because
    the process's limit leaves no more becomes an error about that limit.
    """
    from toolkit.offload.overhead import ProcessLimit, most_bytes
    from toolkit.storage.gguf_store import open_store

    stores = [open_store(folder) for folder in (options.folder, options.draft) if folder]
    coming = _overhead(options, tokenizer, stores[0], what)
    if memory_bytes is not None:
        limit = ProcessLimit.now(memory_bytes, coming)
        with limit.explained():
            yield {**budgets, "dram_bytes": limit.budget(budgets["dram_bytes"])}
    else:
        most = sum(map(most_bytes, stores))
        with _within_free(options, coming, most, budgets["dram_bytes"]) as dram_bytes:
            yield {**budgets, "dram_bytes": dram_bytes}


@contextmanager
def _within_free(options: Namespace, coming, most: int, asked: int | None) -> Iterator[int]:
    """The budget of DRAM within what is free; a line says what the process will take."""
    from toolkit.offload.budget import BudgetError
    from toolkit.offload.overhead import budget_within

    memory_limits.trim()
    present, dram_bytes = memory_limits.anonymous_bytes(), budget_within(asked, most, coming)
    weights = min(dram_bytes, most) if options.device == "cpu" else dram_bytes
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


def _overhead(options: Namespace, tokenizer, store, what: str):
    from toolkit.commands.text import prompt_of
    from toolkit.errors import UserError
    from toolkit.kernels.engine import compiled
    from toolkit.offload.overhead import Overhead

    prompt, new = prompt_of(options, tokenizer, store.config())["input_ids"].shape[1], options.max_new_tokens
    if options.context is not None and prompt + new > options.context:
        raise UserError(
            f"--context {options.context}: the prompt has {prompt} tokens, and {new} are to follow: expected "
            f"{prompt + new} or more"
        )
    return Overhead.of_store(store, prompt, new, not compiled.ran_before(what), options.context or 0)
