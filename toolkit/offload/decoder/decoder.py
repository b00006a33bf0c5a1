"""Tokens through a decoder of a GGUF file within a budget of memory.

    with Decoder.open(header, architecture, Budget("DRAM", 700_000_000), context=512) as decoder:
        logits = decoder.prefill(prompt)         # fp32 [words]
        logits = decoder.step(int(logits.argmax()))

Pieces that stay in memory and follow each other are one program, which a single call runs. The others are read while
earlier ones compute, as `toolkit.offload.streamer` does it.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from math import ceil
from typing import Any, Self

import numpy as np
from jaxtyping import Float32

from toolkit.errors import UserError
from toolkit.kernels.engine.parallel import Program
from toolkit.kernels.engine.team import num_threads
from toolkit.models.gguf_header import GgufHeader
from toolkit.offload.block_steps import STAYING, block_steps, stretches
from toolkit.offload.budget import Budget
from toolkit.offload.decoder.architecture import Architecture
from toolkit.offload.decoder.experts import PROGRAM_BYTES, Mixtures, least_experts_bytes
from toolkit.offload.decoder.steps import (
    UP_AT_ONCE,
    Ffn,
    FileBlock,
    GatedFfn,
    KeysAndValues,
    Products,
    Step,
    TokenVectors,
    head_steps,
    stages_of,
)
from toolkit.offload.decoder.weights import FFN, DecoderFile
from toolkit.offload.generation import PASS, SCORES_BYTES
from toolkit.offload.methods import GGUF, PACKED
from toolkit.offload.overhead import COMPILER, FLOAT, SPAN, Overhead, TextRoom
from toolkit.offload.placement import filled, least_bytes
from toolkit.offload.plan import Plan
from toolkit.offload.streamer import Streamer
from toolkit.offload.ways import POLICIES, Way
from toolkit.storage.buffers import HUGE_PAGE_BYTES
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers import open_reader
from toolkit.timeline import Recorder
from toolkit.vocabulary import check_known

# of the vectors of a prompt's tokens that are computed together. Each batch reads all pieces that pass, once; with more
# memory for it fewer pieces would stay, and each new token would read them again
BATCH_BYTES = 28_000_000
FEWEST = 32  # tokens of a batch
SCRATCH_BYTES = 1_000_000  # of each thread: rows unpacked for a prompt, or scores of its attention
OPENING = 32_000_000  # the first compiled kernels, threads, programs, buffers of reads
CODE = 16_000_000  # pages of libraries that are needed again and again


class Decoder(AbstractContextManager):
    """A `toolkit.offload.text_model.TextModel` whose weights are the blocks of a GGUF file.

    The cache has room for `context` tokens; a longer text raises `UserError`. `tiers` says where each piece is, "dram"
    or "storage". `mode` says how the disk is read, as `Reader.mode`. If it is `timed`, the spans of all passes stay in
    `recorder`. One thread uses it.
    """

    repeats = False  # sums of many tokens together have another order

    def __init__(
        self,
        file: DecoderFile,
        sizes: Architecture,
        budget: Budget,
        context: int,
        policy: str = "pipelined",
        reader: str | None = None,
        residency: str | None = None,
        timed: bool = False,
    ):
        self.file, self.sizes, self.budget, self.recorder = file, sizes, budget, Recorder()
        way = Way(f"{GGUF}{PACKED}", policy=policy, device="cpu")
        pieces, slots = [layer.nbytes for layer in file.layers], POLICIES[policy].slots
        rest, experts = {"rest": file.vector_bytes}, least_experts_bytes(file, sizes)
        budget.check(**rest, experts=experts, slots=least_bytes(pieces, slots))
        budget.take(**rest)
        self.tiers = filled(pieces, slots, budget.left_bytes - experts)
        with ExitStack() as stack:
            files = stack.enter_context(open_reader(reader, file))
            plan = Plan(file.layers, self.tiers, way)
            self.streamer = stack.enter_context(Streamer(plan, files, budget, self.recorder))
            self.mixtures: Mixtures | None = None
            if sizes.mixture:
                self.mixtures = Mixtures(file, sizes, budget, files, self.recorder, residency)
                stack.callback(self.mixtures.close)
            self._stack = stack.pop_all()
        self.mode, self.words = files.mode, sizes.words
        self.positions: int | None = min(context, sizes.positions)
        self.cache, self.length, self.timed, self._read = KeysAndValues(sizes, context), 0, timed, 0
        dense = [GatedFfn(sizes, number, file.vectors) for number in range(sizes.blocks)]
        self.ffns: Sequence[Ffn] = self.mixtures.ffns if self.mixtures else dense
        self._token, self._prompt, self._closed = _Pass(self, 1), _Pass(self, 1), False

    @classmethod
    def open(cls, header: GgufHeader, sizes: Architecture, budget: Budget, context: int, **options: Any) -> Self:
        """Open a file within a budget, for a text of up to `context` tokens.

        `options` are the other arguments. Raises `UserError` for a reader that this machine cannot run,
        `BudgetError` for a budget that is too small, and `OSError`.
        """
        return cls(DecoderFile.of(header, sizes), sizes, budget, context, **options)

    def prefill(self, tokens: Sequence[int]) -> Float32[np.ndarray, " words"]:
        """The logits after the last token. Raises `ChangedError` if the file has changed, and `OSError`."""
        last = self._through_blocks(tokens)
        if last is not self._token:
            self._token.vectors.take(last.vectors)
            self._prompt = self._token  # whose vectors take less memory
        return self._token.logits()[0]

    def scores(self, tokens: Sequence[int]) -> Float32[np.ndarray, "tokens words"]:
        """The logits after each token."""
        if not tokens:
            raise UserError("a text of no token: give the model at least one")
        at_once = batch_tokens(self.sizes)
        if len(tokens) <= at_once:
            return self._through_blocks(tokens).logits()
        some = (tokens[first : first + at_once] for first in range(0, len(tokens), at_once))
        return np.concatenate([self._through_blocks(each).logits() for each in some])

    def step(self, token: int) -> Float32[np.ndarray, " words"]:
        """The logits after one more token."""
        return self.prefill([token])

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens at most."""
        self.length = min(self.length, length)

    @property
    def held(self) -> str:
        """How much of the weights is in memory, in words."""
        stay, passing = (self.tiers.count(tier) for tier in ("dram", "storage"))
        counts = f"{stay} pieces of layers in DRAM, {passing} on disk, {len(self.file.head)} of them of the head"
        experts = f", {self.mixtures.held}" if self.mixtures else ""
        return f"{counts}{experts} ({self.mode} reads); {self.budget.used_bytes / 1e6:.1f} MB dram held"

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that were read again since the model was opened."""
        return self._read + self.recorder.moved("read")

    def _through_blocks(self, tokens: Sequence[int]) -> "_Pass":
        """Compute all blocks for these tokens; the pass of the last ones."""
        if self._closed:
            raise UserError("the model is closed: open it again")
        check_known(min(tokens), max(tokens), self.words)
        if (end := self.length + len(tokens)) > self.cache.positions:
            raise UserError(f"{end} tokens: expected {self.cache.positions} at most, the context")
        at_once = ceil(len(tokens) / ceil(len(tokens) / batch_tokens(self.sizes)))  # of one size: programs serve again
        for first in range(0, len(tokens), at_once):
            some = tokens[first : first + at_once]
            self._add(some)
        if not self.timed:
            self._read += self.recorder.take_bytes("read")
        return self._pass(len(some))

    def _add(self, tokens: Sequence[int]) -> None:
        """Compute all blocks for some tokens together."""
        now = self._pass(len(tokens))
        now.vectors.begin(self.file.rows(tokens) * np.float32(self.sizes.embedding_scale), self.length)
        now.through_blocks()
        self.length += len(tokens)

    def _pass(self, tokens: int) -> "_Pass":
        """The pass of so many tokens. That of one token stays, and of the others the last one."""
        if tokens == 1:
            return self._token
        if self._prompt.vectors.tokens != tokens:
            self._prompt = self._token  # the last one goes first: there is memory for the vectors of one
            self._prompt = _Pass(self, tokens)
        return self._prompt

    def close(self) -> None:
        """Wait for the read under way, close the files and release the weights; later calls do nothing."""
        if not self._closed:
            self._closed = True
            del self._token, self._prompt
            self._stack.close()

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()


class _Pass:
    """The work on so many tokens, cut into stretches."""

    def __init__(self, decoder: Decoder, tokens: int):
        self.decoder, self.vectors = decoder, TokenVectors(decoder.sizes, tokens)
        numbers, cache = decoder.file.vectors, decoder.cache
        steps = (
            step
            for number, ffn in enumerate(decoder.ffns)
            for step in block_steps(FileBlock(decoder.sizes, number, numbers, self.vectors, cache, ffn), self.vectors)
        )
        self._blocks = _stretches(decoder, steps)
        self._head, self._parts = list[_Stretch](), dict[str, np.ndarray]()

    def through_blocks(self) -> None:
        """Compute all blocks."""
        for stretch in self._blocks:
            stretch.run()

    def logits(self) -> Float32[np.ndarray, "tokens words"]:
        """The logits of what the blocks computed."""
        if not self._head:  # the pass of a prompt does not need it
            file, tokens = self.decoder.file, self.vectors.tokens
            self._parts = {name: np.zeros((tokens, words), np.float32) for name, words in file.head.items()}
            steps = head_steps(file.vectors, self.decoder.sizes, self.vectors, self._parts)
            self._head = _stretches(self.decoder, steps)
        for stretch in self._head:
            stretch.run()
        return np.concatenate([*self._parts.values()], axis=1)


class _Stretch:
    """A stretch of steps: of pieces that stay, or of one that passes; a program for each place that weights lie in."""

    def __init__(self, decoder: Decoder, steps: Sequence[Step]):
        self.decoder, self.steps = decoder, steps
        layers, products = decoder.file.layers, [step for step in steps if isinstance(step, Products)]
        self.pieces = [*dict.fromkeys(decoder.file.piece_of[name] for step in products for name in step.outs)]
        self.nbytes = sum(layers[piece].nbytes for piece in self.pieces)
        self._programs: dict[int, Program] = {}

    def run(self) -> None:
        """Run its steps. If they multiply, they are one span, of stage `compute`."""
        decoder, place = self.decoder, 0
        if self.pieces:
            weights = decoder.streamer.layer(self.pieces[0])  # one look is enough: of several, all stay
            place = next(iter(weights.values())).data.ctypes.data  # a piece that passes lies in several places
        if place not in self._programs:
            weights = {name: matrix for piece in self.pieces for name, matrix in decoder.streamer.layer(piece).items()}
            self._programs[place] = Program(stages_of(self.steps, weights))
        begun_s = decoder.recorder.now_s()
        self._programs[place].run()
        if self.pieces:
            decoder.recorder.record("compute", "pieces", "dram", begun_s, self.nbytes, self.pieces[0])


def _stretches(decoder: Decoder, steps: Iterable[Step]) -> list[_Stretch]:
    def place_of(step: Step) -> int | None:
        if not isinstance(step, Products):
            return None
        piece = decoder.file.piece_of[next(iter(step.outs))]  # all its matrices are of one piece
        return STAYING if decoder.tiers[piece] == "dram" else piece

    return [_Stretch(decoder, some) for some in stretches(steps, place_of)]


def overhead(sizes: Architecture, room: TextRoom, compiles: bool) -> Overhead:
    """The memory that comes beside weights and buffers; `compiles`: no compiled kernels are kept."""
    batch = min(room.prompt, batch_tokens(sizes))
    at_once = min(PASS, batch_tokens(sizes))
    spans = room.new * most_spans(sizes, 1) + ceil(room.prompt / at_once) * most_spans(sizes, at_once)
    return Overhead(
        opening=OPENING,
        compiler=COMPILER if compiles else 0,
        cache=sizes.cache_bytes(room.positions),
        prompt=batch * sizes.vector_bytes
        + min(batch, UP_AT_ONCE) * sizes.ffn * FLOAT
        + num_threads() * SCRATCH_BYTES
        + 2 * room.positions * sizes.heads * FLOAT,
        logits=3 * FLOAT * sizes.words + room.scored * 2 * SCORES_BYTES,  # of the parts of the head, and joined
        timeline=SPAN * spans,
        code=CODE,
    )


def most_spans(sizes: Architecture, tokens: int) -> int:
    """A bound of the spans of a pass: each piece and each expert is read once and computed once."""
    experts = min(sizes.mixture.experts, sizes.mixture.used * tokens) if sizes.mixture else 0
    return 2 * ((1 + len(FFN) + experts) * sizes.blocks + sizes.words // max(1, sizes.ffn) + 2)


def most_bytes(header: GgufHeader) -> int:
    """A bound of what weights and buffers of a file can take."""
    tensors = header.tensors.values()
    parts = sum(tensor.shape[0] if len(tensor.shape) > 2 else 1 for tensor in tensors)  # experts lie apart
    return sum(tensor.nbytes for tensor in tensors) + parts * (PROGRAM_BYTES + 2 * BLOCK_BYTES) + 2 * HUGE_PAGE_BYTES


def batch_tokens(sizes: Architecture) -> int:
    """How many tokens of a prompt are computed together."""
    return max(FEWEST, BATCH_BYTES // sizes.vector_bytes)
