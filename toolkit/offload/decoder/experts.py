"""The mixtures of a decoder: a token's experts are read from the GGUF file where memory does not hold them.

    mixtures = Mixtures(file, sizes, budget, reader, recorder)
    mixtures.ffns[0].steps(vectors)    # the router, the chosen experts, the shared expert

Each block keeps as many experts as fit, all blocks the same number. If the budget has no room for the experts of one
token in every block, all blocks use the same slots in turn, and nothing stays. An expert is computed by one program.
The outputs of a token's experts are added in the order of their scores, so results do not depend on what is in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import UInt8

from toolkit.errors import unknown
from toolkit.kernels import blocks
from toolkit.kernels.engine.parallel import Program, Task
from toolkit.kernels.mixture import add_gated, mix, route
from toolkit.kernels.single_token import add_to
from toolkit.models.gguf_header import LAYERS
from toolkit.offload.budget import Budget
from toolkit.offload.decoder.architecture import ROUTED, ROUTER, SHARE, SHARED, Architecture
from toolkit.offload.decoder.steps import Step, TokenVectors, gated, stages_of
from toolkit.offload.decoder.weights import FFN, DecoderFile, MatrixBlocks
from toolkit.offload.expert_slots import ExpertSlots
from toolkit.residency.policies import Lru, online, residency_of
from toolkit.residency.two_level import TwoLevel
from toolkit.storage.buffers import HUGE_PAGE_BYTES, aligned_buffer, buffer_bytes
from toolkit.storage.readers import Reader
from toolkit.timeline import Recorder

PROGRAM_BYTES = 16_000  # of a slot: the program of the expert that is there

Slots = UInt8[np.ndarray, "experts bytes"]


class Mixtures:
    """The routed experts of all blocks of a file, in the memory that is left of a budget. `ffns` are the blocks' FFNs.

    `residency` names the policy by which experts stay; None keeps those used last. Raises `UserError` for a policy that
    needs to know what comes, and `BudgetError` if not even the experts of one token fit.
    """

    def __init__(
        self,
        file: DecoderFile,
        sizes: Architecture,
        budget: Budget,
        reader: Reader,
        recorder: Recorder,
        residency: str | None = None,
    ):
        assert sizes.mixture is not None
        self.sizes, self.mixture, self.recorder = sizes, sizes.mixture, recorder
        if residency not in (None, *online()):
            raise unknown("residency policy", residency, online())
        policy: Callable = Lru if residency is None else partial(residency_of, residency)
        self.slots = [
            ExpertSlots(TwoLevel(len(experts), 1, len(arena), policy), experts, arena, reader, recorder, number)
            for number, (experts, arena) in enumerate(zip(file.experts, self._arenas(file, budget), strict=True))
        ]
        self.ffns = [MixtureFfn(self, number, file.vectors, block.nbytes) for number, block in enumerate(file.experts)]
        self._last = self.slots[0]
        self._vectors: WeakKeyDictionary[TokenVectors, MixtureVectors] = WeakKeyDictionary()

    def slots_of(self, block: int) -> ExpertSlots:
        """The slots of a block. If all blocks use the same ones, the experts of another block leave."""
        if self.in_turn and self._last is not self.slots[block]:
            self._last.clear()
        self._last = self.slots[block]
        return self._last

    def vectors_of(self, vectors: TokenVectors) -> "MixtureVectors":
        """The vectors that mixtures need beside those of a pass."""
        if vectors not in self._vectors:
            most = max(len(slots.held) for slots in self.slots)
            self._vectors[vectors] = MixtureVectors(self.sizes, vectors.tokens, most)
        return self._vectors[vectors]

    @property
    def held(self) -> str:
        """How many of the experts fit into memory, and how many were there when they were needed, in words."""
        counts = [slots.cache.of_experts for slots in self.slots]
        room = 0 if self.in_turn else sum(len(slots.held) for slots in self.slots)
        share = room / (self.mixture.experts * len(self.slots))
        read = sum(each.late + each.prefetched - each.wasted for each in counts)
        hits = 1 - read / max(1, sum(each.needed for each in counts))
        return f"DRAM for {share:.0%} of the experts, {hits:.0%} of those needed were there"

    def close(self) -> None:
        """Wait for the reads under way, and release the experts."""
        self._last.clear()
        self.slots, self.ffns = [], []

    def _arenas(self, file: DecoderFile, budget: Budget) -> Iterator[Slots]:
        """The slots of each block, in memory that is taken from the budget."""
        used, most, widths = self.mixture.used, self.mixture.experts, [experts.slot_bytes for experts in file.experts]
        room = budget.left_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        counts = _counts([width + PROGRAM_BYTES for width in widths], used, most, room)
        self.in_turn = not counts
        if self.in_turn:
            widest = max(widths)
            count = int(min(most, max(used, room // (widest + PROGRAM_BYTES))))
            budget.take(experts=buffer_bytes(count * (widest + PROGRAM_BYTES)))
            yield from [aligned_buffer(count * widest).reshape(count, widest)] * len(widths)
            return
        nbytes = [count * width for count, width in zip(counts, widths, strict=True)]
        budget.take(experts=buffer_bytes(sum(nbytes) + sum(counts) * PROGRAM_BYTES))
        arena = aligned_buffer(sum(nbytes))
        for count, width, size in zip(counts, widths, nbytes, strict=True):
            yield arena[:size].reshape(count, width)
            arena = arena[size:]


def least_experts_bytes(file: DecoderFile, sizes: Architecture) -> int:
    """The memory without which a token's experts cannot be computed; 0 for a model without mixtures."""
    widest = max((experts.slot_bytes for experts in file.experts), default=0)
    return buffer_bytes(sizes.mixture.used * (widest + PROGRAM_BYTES)) if sizes.mixture else 0


def _counts(sizes: Sequence[int], least: int, most: int, room: float) -> list[int]:
    """How many experts each block keeps, of these bytes in each block: none if `least` do not fit everywhere."""
    each = int(min(most, room // sum(sizes)))
    if each < least:
        return []
    counts, left = [], room - each * sum(sizes)
    for size in sizes:
        more = each < most and size <= left
        counts.append(each + more)
        left -= more * size
    return counts


class MixtureVectors:
    """The vectors of so many tokens that mixtures write to, fp32. All blocks use them in turn.

    `places` [tokens, used] are the rows of `outputs` that have the outputs of a token's experts. For a single token the
    rows are the slots of experts, so that the program of an expert writes to one place, whatever its rank.
    """

    def __init__(self, sizes: Architecture, tokens: int, slots: int):
        assert sizes.mixture is not None
        used, width = sizes.mixture.used, sizes.mixture.width
        self.scores = np.zeros((tokens, sizes.mixture.experts), np.float32)
        self.experts, self.weights = np.zeros((tokens, used), np.int64), np.zeros((tokens, used), np.float32)
        self.places = np.arange(tokens * used).reshape(tokens, used)
        self.outputs = np.zeros((slots if tokens == 1 else tokens * used, sizes.hidden), np.float32)
        self.gate, self.up = (np.zeros((1, width), np.float32) for _ in range(2))
        self.shared, self.share = np.zeros((tokens, sizes.hidden), np.float32), np.zeros((tokens, 1), np.float32)


class MixtureFfn:
    """The FFN of a block that is a mixture; see `toolkit.offload.decoder.steps.Ffn`.

    `numbers` are norms, biases and routers, `nbytes` those of an expert.
    """

    def __init__(self, mixtures: Mixtures, number: int, numbers: Mapping[str, np.ndarray], nbytes: int):
        self.mixtures, self.number, self.numbers = mixtures, number, numbers
        self.block, self.activation = f"{LAYERS}{number}.", mixtures.sizes.activation
        self.nbytes = nbytes

    def steps(self, vectors: TokenVectors) -> list[Step]:
        """See `Ffn`."""
        mixture, own = self.mixtures.mixture, self.mixtures.vectors_of(vectors)
        experts = (_Token if vectors.tokens == 1 else _Prompt)(self, vectors.given, own)
        return [
            *self._scored(ROUTER, vectors.given, own.scores),
            Task(route, (own.scores, mixture.renormalised, own.experts, own.weights)),
            Task(experts.run, ()),
            Task(mix, (own.outputs, own.places, own.weights, vectors.more)),
            *(self._shared(vectors, own) if mixture.shared else ()),
        ]

    def expert(self, number: int, weights: Mapping[str, MatrixBlocks], *vectors: np.ndarray) -> Program:
        """The program of an expert with these weights; `vectors` are those of `gated`."""
        names = [f"ffn_{name}{ROUTED}" for name in FFN]
        biases = ((f"{name}.bias", self.numbers.get(f"{self.block}{name}.bias")) for name in names)
        own = {name: bias[number] for name, bias in biases if bias is not None}
        return Program(stages_of(gated(own, names, self.activation, *vectors), weights))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The block is the span of an expert."""
        recorder = self.mixtures.recorder
        begun_s = recorder.now_s()
        yield
        recorder.record("compute", "expert", "dram", begun_s, self.nbytes, self.number)

    def _shared(self, vectors: TokenVectors, own: MixtureVectors) -> list[Step]:
        """The expert of all tokens, and its share in what the mixture gives."""
        names = [f"{self.block}ffn_{name}{SHARED}" for name in FFN]
        return [
            *gated(self.numbers, names, self.activation, vectors.given, vectors.gate, vectors.up, own.shared),
            *self._scored(SHARE, vectors.given, own.share),
            Task(add_gated, (own.shared, own.share, vectors.more)),
        ]

    def _scored(self, router: str, x: np.ndarray, scores: np.ndarray) -> list[Step]:
        """The product with a router, which is in memory, and its bias."""
        weight, bias = (self.numbers.get(f"{self.block}{router}.{kind}") for kind in ("weight", "bias"))
        steps: list[Step] = [blocks.product("F32", np.atleast_2d(weight), x, scores).task]
        return steps if bias is None else [*steps, Task(add_to, (scores, bias))]


class _Token:
    """The chosen experts of a block for a single token, x [1, hidden]. Their programs stay as long as the experts."""

    def __init__(self, ffn: MixtureFfn, x: np.ndarray, own: MixtureVectors):
        self.ffn, self.x, self.own = ffn, x, own
        self._programs: dict[int, tuple[int, Program]] = {}

    def run(self) -> None:
        """Compute them: first those that are in memory, then the others as they arrive."""
        slots, chosen = self.ffn.mixtures.slots_of(self.ffn.number), self.own.experts[0].tolist()
        slots.bring(chosen)
        for _, expert in sorted((slots.coming(expert), expert) for expert in chosen):
            slot = slots.slot(expert)
            self.own.places[0, chosen.index(expert)] = slot
            program = self._program(slots, expert, slot)
            with self.ffn.computing():
                program.run()

    def _program(self, slots: ExpertSlots, expert: int, slot: int) -> Program:
        """The program of an expert in a slot."""
        if (known := self._programs.get(slot)) and known[0] == expert:
            return known[1]
        vectors = self.x, self.own.gate, self.own.up, self.own.outputs[slot : slot + 1]
        program = self.ffn.expert(expert, slots.weights(expert), *vectors)
        self._programs[slot] = expert, program
        return program


class _Prompt:
    """The chosen experts of a block for several tokens, x [tokens, hidden]: each computes all tokens that chose it."""

    def __init__(self, ffn: MixtureFfn, x: np.ndarray, own: MixtureVectors):
        self.ffn, self.x, self.own = ffn, x, own

    def run(self) -> None:
        """Compute them: first those that are in memory. While one computes, as many as fit are read."""
        slots, chosen = self.ffn.mixtures.slots_of(self.ffn.number), self.own.experts
        there = set(slots.held)
        order = sorted(np.unique(chosen).tolist(), key=lambda expert: (expert not in there, expert))
        for at, expert in enumerate(order):
            slots.bring([expert])
            slots.prefetch(order[at + 1 : at + len(slots.held)], [expert])
            places = np.flatnonzero(chosen == expert)
            weights, x = slots.weights(expert), self.x[places // chosen.shape[1]]
            gate, up = (np.empty((len(x), self.own.gate.shape[1]), np.float32) for _ in range(2))
            out = np.empty_like(x)
            program = self.ffn.expert(expert, weights, x, gate, up, out)
            with self.ffn.computing():
                program.run()
            self.own.outputs[places] = out
