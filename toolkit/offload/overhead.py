"""How many bytes of a process's limit weights may take (`ProcessLimit`), and all that comes beside them (`Overhead`).

    overhead = Overhead.of(config, TextRoom(prompt=1500, new=40))
    room = memory_limits.free_bytes() - overhead.nbytes    # for the budget

Imports and the tokenizer are in memory when this is asked, so `free_bytes` leaves them out. The rest is an upper
bound, which `benchmarks/memory_limits.py` compares with the memory that processes really take.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from inspect import signature
from math import ceil
from typing import Self

from toolkit import memory_limits
from toolkit.errors import UserError
from toolkit.offload.budget import BudgetError
from toolkit.offload.generation import SCORES_BYTES

MB = 1e6
# the model's modules, the first compiled kernels, threads, buffers of reads: 18 to 31 MB for four folders and three
# GGUF files of 0.1 to 1.5 billion weights, and 60 MB for a folder of neurons
OPENING, BY_NEURON = 50_000_000, 35_000_000
COMPILER = 130_000_000  # LLVM, where kernels are not kept from an earlier process
CODE = 40_000_000  # pages of libraries, which would have to be read again and again if there were no room for them
SPAN = 160  # bytes of a span on the timeline, most of them for a moment, when the time is divided among stages
SPANS = 24  # of a layer and pass at most, beside those of experts
SPANS_OF_EXPERT = 2  # read and used
FLOAT = 4
WIDTHS = 3  # vectors of a layer's widths that exist at once for each token of a prompt
RESIDENT_SHARE = 0.9  # of free memory; the rest is for other processes and page tables
ROOM = 256  # positions that a cache of keys and values grows by: so often is it copied, and so much memory waits
LEAST_MARGIN = 1.01  # of the least limit that is named: what a process holds after its imports differs a little
EXPERTS_OF_A_LAYER = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # in configurations
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
FILLED = 1.25  # what padding and buffers add to the bytes of weights, at most
BUFFERS = 64_000_000


@dataclass(frozen=True)
class TextRoom:
    """The tokens that memory is left for: a prompt, and new ones after it; `context` in all, if that is more.

    The prompt is computed in passes of `at_once` tokens; None: in one. `scored`: each of its tokens may be scored.
    """

    prompt: int
    new: int = 0
    context: int = 0
    at_once: int | None = None
    scored: bool = False

    @property
    def positions(self) -> int:
        """The tokens that the key-value cache has room for."""
        return max(self.prompt + self.new, self.context)

    @property
    def passed(self) -> int:
        """The tokens of the prompt that are computed at once."""
        return min(self.prompt, self.at_once or self.prompt)


@dataclass(frozen=True)
class Overhead:
    """Bytes that are still to come beside weights and buffers, by what they are for."""

    opening: int
    compiler: int
    cache: int
    prompt: int
    logits: int
    timeline: int
    code: int = CODE

    @classmethod
    def of(
        cls, config, room: TextRoom, compiles: bool = False, all_logits: bool = False, by_neuron: bool = False
    ) -> Self:
        """For a model of this configuration of transformers, and one text.

        `compiles`: no compiled kernels are kept. `all_logits`: the model gives logits for each token of a prompt.
        `by_neuron`: FFNs are read by neuron.
        """
        config = config.get_text_config()
        hidden, layers = config.hidden_size, config.num_hidden_layers
        heads = getattr(config, "num_attention_heads", 1) or 1
        ffn = max(_number(config, name) for name in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"))
        width, of_expert = 2 * hidden + (ffn or 4 * hidden), _number(config, "moe_intermediate_size") or ffn
        if used := max(_number(config, name) for name in EXPERTS_OF_A_TOKEN):
            width = max(width, used * (2 * hidden + 2 * of_expert))  # each expert has its tokens, gate, up and output
        passed = room.passed
        experts = max(_number(config, name) for name in EXPERTS_OF_A_LAYER) or used * passed
        spans = room.new * (SPANS + SPANS_OF_EXPERT * used)
        spans += ceil(room.prompt / max(1, passed)) * (SPANS + SPANS_OF_EXPERT * min(experts, used * passed))
        scores = passed * room.prompt * (FLOAT if _by_kernel(config) else 2 * FLOAT * heads)
        return cls(
            opening=OPENING + by_neuron * BY_NEURON,
            compiler=COMPILER if compiles else 0,
            cache=cache_bytes(config, room.positions),
            prompt=WIDTHS * FLOAT * passed * width + scores,
            logits=3 * FLOAT * config.vocab_size * (passed if all_logits else 1) + room.scored * 3 * SCORES_BYTES,
            timeline=SPAN * layers * spans,
        )

    @classmethod
    def of_store(cls, store, room: TextRoom, compiles: bool) -> Self:
        """The same for an opened store, whose configuration and layout say the rest."""
        from toolkit.storage.neuron_packing import LAYOUT

        config = store.config()
        return cls.of(config, room, compiles, gives_all_logits(config), LAYOUT in store.variants)

    @property
    def nbytes(self) -> int:
        """All of it, with the pages of libraries."""
        return sum(getattr(self, part.name) for part in fields(self))


def cache_bytes(config, positions: int) -> int:
    """An upper bound of the key-value cache of one text with so many positions, with the room behind them.

    Layers with sliding attention hold no more positions than their window, once the prompt is done.
    """

    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1) or 1
    size = getattr(config, "head_dim", None) or config.hidden_size // max(1, getattr(config, "num_attention_heads", 1))
    pair = 2 * heads * size * (getattr(config.dtype, "itemsize", None) or FLOAT)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    sliding = sum(kind == "sliding_attention" for kind in kinds or ()) if window else 0
    full = config.num_hidden_layers - sliding
    copied = pair * (positions + ROOM)  # one layer at a time is copied to where it can grow
    return pair * (full * (positions + ROOM) + sliding * (min(positions, window or 0) + ROOM)) + copied


def budget_within(asked: int | None, most: int, overhead: Overhead) -> int:
    """The budget of DRAM for this process: what is asked for, or all that its limit leaves for weights, `most` at most.

    Raises `BudgetError` if what is asked for does not fit beside the overhead, or nothing is left. The message says how
    much would.
    """
    free = memory_limits.free_bytes()
    room = int(RESIDENT_SHARE * free) - overhead.nbytes
    if asked is None:
        if room <= 0:
            needed = (overhead.nbytes - room) / RESIDENT_SHARE
            raise BudgetError(
                f"{_mb(free)} MB of memory are free, and {_mb(overhead.nbytes)} MB more are taken beside weights: "
                f"expected {_mb(needed)} MB free and the weights' own; give it more, or a shorter prompt",
                most,
            )
        return room
    if min(asked, most) > room:
        least = ceil((min(asked, most) - room) / RESIDENT_SHARE / MB)
        works = f"give --dram {int(room // MB)}MB at most" if room > MB else "no --dram is small enough"
        raise BudgetError(
            f"--dram {_mb(asked)}MB: the process takes {_mb(overhead.nbytes)} MB more beside it, and {_mb(free)} MB of "
            f"memory are free: {works}, or {least} MB more memory",
            min(asked, most),
        )
    return asked


@dataclass(frozen=True)
class ProcessLimit:
    """A limit for all that this process takes, `nbytes`, and the bytes that it holds when it is set, `present`."""

    nbytes: int
    overhead: Overhead
    present: int

    @classmethod
    def now(cls, nbytes: int, overhead: Overhead, start: int = 0) -> Self:
        """The limit, set now: imports and the tokenizer are in memory. The first `start` bytes do not count."""
        memory_limits.trim()
        return cls(nbytes, overhead, max(0, memory_limits.anonymous_bytes() - start))

    def budget(self, asked: int | None) -> int:
        """The budget of DRAM that the limit leaves, or less if less is asked for; 0 if the overhead fills the limit.

        Raises `UserError` if the limit is more than what is free.
        """
        if self.nbytes - self.present > (free := memory_limits.free_bytes()) + CODE:
            raise UserError(
                f"a limit of {_mb(self.nbytes)} MB for the process, which has {_mb(self.present)} MB: only {_mb(free)} "
                f"MB of memory are free; give a limit of {int((self.present + free) // MB)}MB at most"
            )
        room = max(0, min(self.nbytes - self.present, free) - self.overhead.nbytes)
        return room if asked is None else min(asked, room)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Inside the block, a budget of DRAM that is too small becomes an error about the limit."""
        try:
            yield
        except BudgetError as error:
            beside, needed = self.present + self.overhead.nbytes, error.needed_bytes
            least = ceil(LEAST_MARGIN * (beside + needed) / MB)
            raise BudgetError(
                f"a limit of {_mb(self.nbytes)} MB for the process is too small: {least} MB are needed. Python, its "
                f"libraries and the tokenizer take {_mb(self.present)} MB, {_mb(self.overhead.nbytes)} MB more come "
                f"beside weights, and weights with their buffers take {_mb(needed)} MB at least",
                needed,
            ) from error


def _mb(nbytes: float) -> int:
    """Megabytes, rounded up: enough."""
    return ceil(nbytes / MB)


def most_bytes(store) -> int:
    """A bound of what weights and buffers of an opened store can take."""
    return int(FILLED * (store.ops_bytes + store.rest_bytes)) + BUFFERS + 3 * store.largest_bytes


def gives_all_logits(config) -> bool:
    """Whether a model of this configuration of transformers gives logits for each token of a prompt."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    forward = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "forward", None)
    return forward is None or "logits_to_keep" not in signature(forward).parameters


def _number(config, name: str) -> int:
    value = getattr(config, name, None) or 0
    return max(value) if isinstance(value, list | tuple) else int(value)


def _by_kernel(config) -> bool:
    """Whether attention scores are never in memory as a whole."""
    return getattr(config, "_attn_implementation", None) in (None, "sdpa")
