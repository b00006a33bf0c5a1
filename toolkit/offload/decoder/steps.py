"""The block of a GGUF file as steps on the vectors of some tokens: products with its matrices, and the tasks between.

    vectors = TokenVectors(architecture, 5)
    block_steps(FileBlock(architecture, 0, file.vectors, vectors, cache, ffn), vectors)

Products name their matrices only, so that the same steps serve whatever buffer a piece was read into.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numba.core.dispatcher import Dispatcher

from toolkit.kernels import blocks, eight_bit_cache
from toolkit.kernels.attention import prompt_attention, tiles_of
from toolkit.kernels.engine.parallel import Product, Task, stages
from toolkit.kernels.single_token import NO_SINKS, add_to, append, attention, gate
from toolkit.models.gguf_header import LAYERS
from toolkit.offload.block_steps import Norm, Norms, adding
from toolkit.offload.decoder.architecture import FFN_NORM, NORM, Architecture
from toolkit.offload.decoder.rotary import Rotary
from toolkit.offload.decoder.weights import FFN, MatrixBlocks

AT_ONCE = 64  # vectors of a product without panels: rounded to 8 bits they fit the second cache
UP_AT_ONCE = 128  # vectors of the second linear of an FFN
PROMPT = 32  # tokens: of so many on, attention takes some together
BITS = {"float32": np.uint32, "bfloat16": np.uint16, eight_bit_cache.Q8_0: np.uint8}  # of the cache


@dataclass(frozen=True)
class Products:
    """Products with one input [vectors, columns]: of each matrix, by its name in the file, into its [vectors, rows]."""

    x: np.ndarray
    outs: Mapping[str, np.ndarray]

    def stages(self, weights: Mapping[str, MatrixBlocks]) -> list[list[Task]]:
        """The products with these weights; without panels a product of many vectors takes some at a time."""
        found = []
        at_once = len(self.x) if all(blocks.in_panels(weights[name].kind) for name in self.outs) else AT_ONCE
        for first in range(0, len(self.x), at_once):
            some = slice(first, first + at_once)
            found += stages([self._product(*weights[name], some, out) for name, out in self.outs.items()])
        return found

    def _product(self, kind: str, data: np.ndarray, some: slice, out: np.ndarray) -> Product:
        return blocks.product(kind, data, self.x[some], out[some])


Step: TypeAlias = Products | Task


def stages_of(steps: Sequence[Step], weights: Mapping[str, MatrixBlocks]) -> list[list[Task]]:
    """The stages of steps with these weights."""
    every = (step.stages(weights) if isinstance(step, Products) else [[step]] for step in steps)
    return [stage for some in every for stage in some]


class KeysAndValues:
    """Keys and values of one text, with room for so many positions.

    Both are the bits of their elements, [blocks, key heads, positions, size], or the bytes of blocks of 8 bits,
    [blocks, key heads, positions, bytes]. Pages that hold nothing take no memory.
    """

    def __init__(self, sizes: Architecture, positions: int):
        bits = np.dtype(BITS[sizes.dtype])
        shape = 2, sizes.blocks, sizes.key_heads, positions, sizes.row_bytes // bits.itemsize
        self.keys, self.values = np.zeros(shape, bits)
        self.positions = positions


def cache_kernels(dtype: str) -> tuple[Dispatcher, Dispatcher]:
    """The functions that add tokens to a cache of this type, and that attend to it from few of them."""
    if dtype == eight_bit_cache.Q8_0:
        return eight_bit_cache.append, eight_bit_cache.attention
    return append(dtype), attention(dtype)


class TokenVectors:
    """The vectors of so many tokens that a pass writes to, fp32. All blocks use them in turn.

    `x` [tokens, hidden] is the hidden state between blocks, and `more` the term that the last part of a block adds to
    it. `up` has room for some tokens at a time. `span` has the position of the first token, and where it attends to
    (`toolkit.kernels.single_token.attention`).
    """

    def __init__(self, sizes: Architecture, tokens: int):
        size, hidden = sizes.head_size, sizes.hidden
        self.tokens, self.span = tokens, np.zeros(2, np.int64)
        self.x, self.more, self.given = (np.zeros((tokens, hidden), np.float32) for _ in range(3))
        self.query, self.attended = (np.zeros((tokens, sizes.heads, size), np.float32) for _ in range(2))
        self.key, self.value = (np.zeros((tokens, sizes.key_heads, size), np.float32) for _ in range(2))
        self.gate, self.up = (np.zeros((count, sizes.ffn), np.float32) for count in (tokens, min(tokens, UP_AT_ONCE)))
        kinds = {id(parameters): parameters for parameters in sizes.ropes}
        self._rotaries = {kind: Rotary(parameters, size) for kind, parameters in kinds.items()}
        self._angles = {kind: np.zeros((2, tokens, size), np.float32) for kind in kinds}

    def begin(self, x: np.ndarray, first: int) -> None:
        """Take the embeddings of tokens, the first of which has this position."""
        self.x[:], self.more[:] = x, 0
        self.span[:] = 0, first + 1
        for kind, rotary in self._rotaries.items():
            rotary.fill(first, *self._angles[kind])

    def take(self, others: "TokenVectors") -> None:
        """Take the state of the last of other tokens."""
        self.x[:], self.more[:] = others.x[-1:], others.more[-1:]

    def angles(self, rope: Mapping) -> np.ndarray:
        """Cosines and sines [2, tokens, size] of a block with these parameters."""
        return self._angles[id(rope)]


class Ffn(Protocol):
    """The FFN of a block."""

    def steps(self, vectors: TokenVectors) -> list[Step]:
        """The steps from `vectors.given` to what the block adds to `vectors.x`, in `vectors.more`."""


@dataclass(frozen=True)
class GatedFfn:
    """The FFN of a block of three matrices: down(act(gate x) · up x). `numbers` are norms and biases."""

    sizes: Architecture
    number: int
    numbers: Mapping[str, np.ndarray]

    def steps(self, vectors: TokenVectors) -> list[Step]:
        """See `Ffn`."""
        of, names = vectors, [f"{LAYERS}{self.number}.ffn_{name}" for name in FFN]
        return gated(self.numbers, names, self.sizes.activation, of.given, of.gate, of.up, of.more)


@dataclass(frozen=True)
class FileBlock:
    """A `toolkit.offload.block_steps.DecoderBlock`; `numbers` are norms and biases by their names in the file."""

    sizes: Architecture
    number: int
    numbers: Mapping[str, np.ndarray]
    vectors: TokenVectors
    cache: KeysAndValues
    of_ffn: Ffn

    @property
    def norms(self) -> Norms:
        """All of them."""
        return Norms(
            attention=self._norm("attn_norm"),
            ffn=self._norm(FFN_NORM),
            query=self._norm("attn_q_norm"),
            key=self._norm("attn_k_norm"),
            after_attention=self._norm("post_attention_norm"),
            after_ffn=self._norm("post_ffw_norm"),
        )

    @property
    def angles(self) -> np.ndarray:
        """Cosines and sines [2, tokens, size]."""
        return self.vectors.angles(self.sizes.ropes[self.number])

    @property
    def paired(self) -> bool:
        """Whether elements that rotate together are neighbours."""
        return self.sizes.paired

    def projected(self, x: np.ndarray, outs: Mapping[str, np.ndarray]) -> "list[Step]":
        """See `DecoderBlock`."""
        names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
        named = {f"{LAYERS}{self.number}.{names[name]}": out for name, out in outs.items()}
        return projected(self.numbers, _flat(x), named)

    def attention(self) -> "list[Step]":
        """See `DecoderBlock`."""
        of, sizes = self.vectors, self.sizes
        keys, values = self.cache.keys[self.number], self.cache.values[self.number]
        many, sinks = of.tokens >= PROMPT, self._number("attn_sinks")
        stretches = tiles_of(of.tokens, sizes.heads, sizes.key_heads) if many else of.tokens
        rows = stretches * sizes.key_heads
        adding, attending = cache_kernels(sizes.dtype)
        window, scale = sizes.windows[self.number], np.float32(sizes.scale)
        given = of.query, keys, values, of.span, window, scale, NO_SINKS if sinks is None else sinks, of.attended
        return [
            Task(adding, (of.key, of.value, of.span, keys, values)),
            Task(prompt_attention(sizes.dtype) if many else attending, given, rows, of.tokens * 2 * keys.nbytes),
        ]

    def ffn(self) -> "list[Step]":
        """See `DecoderBlock`."""
        return self.of_ffn.steps(self.vectors)

    def _norm(self, name: str) -> Norm | None:
        weight = self._number(name)
        return None if weight is None else Norm(weight, self.sizes.epsilon)

    def _number(self, name: str) -> np.ndarray | None:
        return self.numbers.get(f"{LAYERS}{self.number}.{name}.weight")


def gated(
    numbers: Mapping[str, np.ndarray],
    names: Sequence[str],
    activation: str,
    x: np.ndarray,
    inner: np.ndarray,
    up: np.ndarray,
    out: np.ndarray,
) -> list[Step]:
    """down(act(gate x) · up x) into `out`, for linears with the names of gate, up and down.

    As many vectors as `up` has room for go through the second linear at once, so that a prompt takes less memory.
    """
    first, second, last = names
    steps = projected(numbers, x, {first: inner})
    for begin in range(0, len(x), len(up)):
        some = slice(begin, begin + len(up))
        by = up[: len(x[some])]
        steps += projected(numbers, x[some], {second: by})
        steps.append(Task(gate(activation), (inner[some].reshape(-1), by.reshape(-1)), by.size, 2 * by.nbytes))
    return [*steps, *projected(numbers, inner, {last: out})]


def head_steps(
    numbers: Mapping[str, np.ndarray], sizes: Architecture, vectors: TokenVectors, parts: Mapping[str, np.ndarray]
) -> list[Step]:
    """The norm before the head, then the products of its parts, by name, into their logits [tokens, words]."""
    norm = Norm(numbers[NORM], sizes.epsilon)
    return [adding(norm, vectors), *(Products(vectors.given, {name: parts[name]}) for name in parts)]


def projected(numbers: Mapping[str, np.ndarray], x: np.ndarray, outs: Mapping[str, np.ndarray]) -> list[Step]:
    """Products with one input, into `outs` by the names of linears, then their biases."""
    flat = {name: _flat(out) for name, out in outs.items()}
    biases = [(flat[name], numbers[f"{name}.bias"]) for name in flat if f"{name}.bias" in numbers]
    products = Products(x, {f"{name}.weight": out for name, out in flat.items()})
    return [products, *(Task(add_to, arrays) for arrays in biases)]


def _flat(vectors: np.ndarray) -> np.ndarray:
    """A view as one row a vector."""
    return vectors.reshape(len(vectors), -1)
