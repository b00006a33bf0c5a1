"""The memory that a process with a packed model may take: its budget of DRAM within the limit of its container."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature

from toolkit import memory_limits

FILLED = 1.25  # what padding and buffers add to the bytes of weights, at most
BUFFERS = 64_000_000


@contextmanager
def within_limit(
    options: Namespace, tokenizer, what: str, budgets: Mapping[str, int | None]
) -> Iterator[dict[str, int | None]]:
    """The budgets with which a folder is opened inside the block; a line says what the process will take.

    `what` names the kernels that are used. Raises `BudgetError` where the process would take more than there is. Inside
    the block, a budget that is too small because the process's limit leaves no more becomes an error about that limit.
    """
    from toolkit.offload.budget import BudgetError
    from toolkit.offload.overhead import budget_within
    from toolkit.storage.gguf_store import open_store

    stores = [open_store(folder) for folder in (options.folder, options.draft) if folder]
    coming = _overhead(options, tokenizer, stores[0], what)
    memory_limits.trim()
    present, asked = memory_limits.anonymous_bytes(), budgets["dram_bytes"]
    most = sum(_most_bytes(store) for store in stores)
    dram_bytes = budget_within(asked, most, coming)
    weights = most if options.device == "cpu" else dram_bytes
    will = present + coming.nbytes - coming.code + min(dram_bytes, weights)
    print(f"the process will take up to {will / 1e6:.0f} MB of memory, without files", file=sys.stderr)
    try:
        yield {**budgets, "dram_bytes": dram_bytes}
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
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from toolkit.commands.text import prompt_of
    from toolkit.kernels.engine import compiled
    from toolkit.offload.overhead import Overhead

    config = store.config()
    prompt = prompt_of(options, tokenizer, config)["input_ids"].shape[1]
    forward = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "forward", None)
    all_logits = forward is None or "logits_to_keep" not in signature(forward).parameters
    return Overhead.of(config, prompt, options.max_new_tokens, not compiled.ran_before(what), all_logits)


def _most_bytes(store) -> int:
    """A bound of what weights and buffers of a folder can take."""
    return int(FILLED * (store.ops_bytes + store.rest_bytes)) + BUFFERS + 3 * store.largest_bytes
