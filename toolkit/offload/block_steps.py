"""The order of a decoder block's work on some vectors, and the stretches that are run by one call.

Both engines take this order: `toolkit.offload.single_token`, whose matrices are packed linears, and
`toolkit.offload.decoder`, whose matrices are blocks of a GGUF file. A block is a row of steps:

    Task        a function of the kernels on vectors: a norm, a rotation, a gate
    products    with the matrices that take the same vectors, such as queries, keys and values; each engine has its own

The row is cut where the weights of the next step are not in memory yet. Steps between two cuts are a stretch. They are
bound to a `Program`, and a single call runs it.

    layers 0 to 11 stay                              layer 12 passes        layer 13 passes
    [norm, q k v, rotate, attend, o, ..., down]      [norm, ..., down]      [norm, ..., down, norm, head]
    a stretch                                        a stretch              a stretch

A function of Python, such as an FFN that reads what it needs itself, is called between two stretches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numba.core.dispatcher import Dispatcher

from toolkit.kernels.engine.parallel import Task
from toolkit.kernels.single_token import add_and_normalise, normalise, part_pairs, rotate

STAYING = -1  # instead of the number of a layer that passes

Step = TypeVar("Step")  # of an engine: a `Task`, or what it makes tasks of once weights are there
Made = TypeVar("Made", covariant=True)


class BlockVectors(Protocol):
    """The vectors of some tokens that a block writes to, fp32.

    `x` [tokens, hidden] is the hidden state between blocks, `given` its norm, and `more` the term that the last part of
    a block adds to `x`. `query` and `attended` are [tokens, heads, size], `key` and `value` [tokens, key heads, size].
    """

    x: np.ndarray
    more: np.ndarray
    given: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    attended: np.ndarray


class Norm(NamedTuple):
    """An RMSNorm: factors, fp32 [size], and ε."""

    weight: np.ndarray
    epsilon: float


@dataclass(frozen=True)
class Norms:
    """The norms of a block: before attention and FFN, of queries and keys, after attention and FFN.

    The norms of queries and keys have the size of a head, or of all heads together.
    """

    attention: Norm
    ffn: Norm
    query: Norm | None = None
    key: Norm | None = None
    after_attention: Norm | None = None
    after_ffn: Norm | None = None


class DecoderBlock(Protocol[Made]):
    """A block as an engine holds it.

    `angles` are cosines and sines [tokens, size]. `paired`: elements of a head that rotate together are neighbours.
    """

    @property
    def norms(self) -> Norms:
        """All of them."""

    @property
    def angles(self) -> Sequence[np.ndarray]:
        """See the class."""

    @property
    def paired(self) -> bool:
        """See the class."""

    def projected(self, x: np.ndarray, outs: Mapping[str, np.ndarray]) -> "Iterable[Made | Task]":
        """The products of q, k, v or o with `x`, their biases added, into `outs`."""

    def attention(self) -> "Iterable[Made | Task]":
        """Keys and values go into the cache, then the queries attend to it: from `query` to `attended`."""

    def ffn(self) -> "Iterable[Made | Task]":
        """From `given` to `more`."""


def block_steps(block: DecoderBlock[Step], of: BlockVectors) -> "Iterator[Step | Task]":
    """The steps of a block: it adds `more` and the attention to `x`, and leaves in `more` what the FFN would add."""
    norms = block.norms
    yield adding(norms.attention, of)
    yield from block.projected(of.given, {"q": of.query, "k": of.key, "v": of.value})
    yield from _normalised(norms.query, of.query)
    yield from _normalised(norms.key, of.key)
    for heads in (of.query, of.key):
        if block.paired:
            yield Task(part_pairs, (heads,))
        yield Task(rotate, (heads, *block.angles))
    yield from block.attention()
    yield from block.projected(of.attended, {"o": of.more})
    yield from _normalised(norms.after_attention, of.more)
    yield adding(norms.ffn, of)
    yield from block.ffn()
    yield from _normalised(norms.after_ffn, of.more)


def adding(norm: Norm, of: BlockVectors) -> Task:
    """Add `more` to `x` and put the norm of the sum into `given`."""
    return Task(add_and_normalise, (of.x, of.more, *norm, of.given))


def _normalised(norm: Norm | None, vectors: np.ndarray) -> list[Task]:
    """The norm of each row as long as the norm, in place, if there is one."""
    if norm is None:
        return []
    rows = vectors.reshape(-1, norm.weight.size)
    return [Task(normalise, (rows, *norm, rows))]


def stretches(steps: Iterable[Step], place_of: Callable[[Step], int | None]) -> Iterator[list[Step]]:
    """The steps of each stretch; a function of Python is by itself.

    `place_of` says where the weights of a step are: `STAYING`, or the number of what passes; None if it has none.
    """
    some: list[Step] = []
    place = None  # of the weights in `some`
    for step in steps:
        needed = place_of(step)
        elsewhere = place is not None and needed is not None and needed != place
        if some and (elsewhere or is_called(step) or is_called(some[0])):
            yield some
            some, place = [], None
        some.append(step)
        place = place if needed is None else needed
    if some:
        yield some


def is_called(step: object) -> bool:
    """Whether Python calls it: it is no part of a program."""
    return isinstance(step, Task) and not isinstance(step.function, Dispatcher)
