"""A cache of one layer's experts, and for each expert in it a cache of its neurons (CORM, section 4.3).

    cache = TwoLevel(experts=8, neurons=14336, slots=4)
    change = cache.step({2: active_neurons, 5: None})   # what to evict, where to place, which neurons to load

It decides and does no I/O. Slots are buffers of one expert's size; a neuron keeps its place in every one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from toolkit.errors import UserError
from toolkit.residency.base import Change, Residency, expect_positive
from toolkit.residency.policies import Lru

Needed = Mapping[int, Int64[np.ndarray, " neurons"] | None]  # of each expert its active neurons; None: all of them
EMPTY = -1
NO_NEURONS = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class TwoLevelChange:
    """The change of one token in a layer: experts to evict (rising), then experts to place, then neurons to load.

    Args:
        evicted: these experts leave with all their neurons.
        placed: (expert, slot) of each new expert; its slot holds none of its neurons yet.
        load: of each expert that lacks some, the neurons to load, rising.
    """

    evicted: Int64[np.ndarray, " evicted"]
    placed: tuple[tuple[int, int], ...]
    load: dict[int, Int64[np.ndarray, " neurons"]]

    @property
    def neurons(self) -> int:
        """Neurons to load, of all experts together."""
        return sum(len(each) for each in self.load.values())


@dataclass
class CacheCounts:
    """Counts of the experts, or neurons, so far.

    Args:
        needed: by steps, those that were there included.
        late: of these, loaded only when they were needed.
        prefetched: loaded before.
        wasted: of those, gone before a step needed them.
    """

    needed: int = 0
    late: int = 0
    prefetched: int = 0
    wasted: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of the needed units that were in memory; NaN if none was needed."""
        return (self.needed - self.late) / self.needed if self.needed else float("nan")


class TwoLevel:
    """The experts of one layer in `slots`, and which neurons of each expert are there.

    Args:
        experts: that the layer's router chooses from.
        neurons: of one expert.
        slots: experts that memory has room for, whole.
        policy: says which expert goes: `policy(experts, rows=slots)` gives a residency.

    While an expert stays, neurons are only added to it (the union of those cached and those active); they leave with
    it. `of_experts` and `of_neurons` are the counts of both. Raises `UserError` for numbers below 1.
    """

    def __init__(self, experts: int, neurons: int, slots: int, policy: Callable[..., Residency] = Lru):
        expect_positive(experts=experts, neurons=neurons, slots=slots)
        self.residency = policy(experts, rows=slots)
        self.experts, self.neurons, self.slots = experts, neurons, self.residency.rows
        self.slot_of = np.full(experts, EMPTY)
        self.present: Bool[np.ndarray, "slots neurons"] = np.zeros((self.slots, neurons), dtype=bool)
        self.of_experts, self.of_neurons = CacheCounts(), CacheCounts()
        self._ahead = np.zeros_like(self.present)  # prefetched, and not needed so far
        self._ahead_experts = np.zeros(experts, dtype=bool)

    def clear(self) -> None:
        """Hold nothing, and begin again. The counts go on."""
        self._leave(np.flatnonzero(self.slot_of != EMPTY))
        self.residency.clear()

    def held(self, expert: int) -> Bool[np.ndarray, " neurons"]:
        """The expert's neurons that are in memory: none if the expert is not."""
        slot = self.slot_of[expert]
        return np.zeros(self.neurons, dtype=bool) if slot == EMPTY else self.present[slot].copy()

    def step(self, needed: Needed) -> TwoLevelChange:
        """Hold what a token needs, and say what changes.

        Raises `UserError`, and changes nothing, for experts that are not there, or more of them than slots.
        """
        if len(needed) > self.slots:
            raise UserError(
                f"a token needs {len(needed)} experts of a layer, and memory holds {self.slots}: "
                f"allow {len(needed)} slots or more"
            )
        change = self._apply(self.residency.step(np.array(sorted(needed), dtype=np.int64)), needed)
        self.of_experts.needed += len(needed)
        self.of_experts.late += len(change.placed)
        self.of_neurons.needed += sum(self.neurons if some is None else len(set(some)) for some in needed.values())
        self.of_neurons.late += change.neurons
        for expert, some in needed.items():
            self._ahead_experts[expert] = False
            self._ahead[self.slot_of[expert], slice(None) if some is None else some] = False
        return change

    def admit(self, expected: Needed, protect: Sequence[int] = ()) -> TwoLevelChange:
        """Prefetch: hold experts that a token is expected to need, the likeliest first, as far as there is room.

        Neither they nor those of `protect` are evicted; experts that find no room are left out. An expert counts as
        used when a step needs it. Raises `UserError` as `step` does.
        """
        admitted = self.residency.admit(list(expected), protect)
        change = self._apply(admitted, {each: expected[each] for each in expected if self.residency.held[each]})
        self.of_experts.prefetched += len(change.placed)
        self.of_neurons.prefetched += change.neurons
        self._ahead_experts[admitted.loaded] = True
        for expert, some in change.load.items():
            self._ahead[self.slot_of[expert], some] = True
        return change

    def _apply(self, change: Change, needed: Needed) -> TwoLevelChange:
        """Move experts between slots, and add the needed neurons to those present."""
        placed: tuple[tuple[int, int], ...] = ()
        if len(change.dropped) or len(change.loaded):  # nothing changes for most tokens of a model that fits
            self._leave(change.dropped)
            free = np.setdiff1d(np.arange(self.slots), self.slot_of)
            placed = tuple(zip(change.loaded.tolist(), free.tolist(), strict=False))
        for expert, slot in placed:
            self.slot_of[expert] = slot
        load = {int(expert): missing for expert, some in needed.items() if len(missing := self._missing(expert, some))}
        for expert, missing in load.items():
            self.present[self.slot_of[expert], missing] = True
        return TwoLevelChange(change.dropped, placed, load)

    def _leave(self, experts: Int64[np.ndarray, " gone"]) -> None:
        """Empty the slots of experts; what was prefetched for nothing is counted."""
        slots = self.slot_of[experts]
        self.of_neurons.wasted += int(self._ahead[slots].sum())
        self.of_experts.wasted += int(self._ahead_experts[experts].sum())
        self.present[slots] = self._ahead[slots] = False
        self.slot_of[experts], self._ahead_experts[experts] = EMPTY, False

    def _missing(self, expert: int, neurons: Int64[np.ndarray, " some"] | None) -> Int64[np.ndarray, " missing"]:
        present = self.present[self.slot_of[expert]]
        if neurons is None:
            return NO_NEURONS if present.all() else np.flatnonzero(~present)
        neurons = np.unique(np.asarray(neurons, dtype=np.int64))
        return neurons[~present[neurons]]
