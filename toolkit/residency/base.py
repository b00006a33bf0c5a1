"""The units that stay in memory: some of one layer, neurons or experts, and what each token changes.

    residency = SlidingWindow(units=4096, tokens=5, rows=1000)
    change = residency.step(needed)   # what to drop and what to load before this token can be computed

A policy is a subclass. It decides which units are dropped. The loaded units are always those that the token needs and
memory does not hold yet.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from toolkit.errors import UserError


@dataclass(frozen=True, eq=False)
class Change:
    """The change of one token: units to drop, then units to load. Both rise."""

    dropped: Int64[np.ndarray, " dropped"]
    loaded: Int64[np.ndarray, " loaded"]


class Residency(ABC):
    """Which units of a layer are in memory: `held` [units], never more than `rows` of them.

    `step` changes `held` in place. `rows` of None is room for all units.

    Raises `UserError` for numbers below 1.
    """

    def __init__(self, units: int, rows: int | None = None):
        expect_positive(units=units, rows=rows)
        self.units, self.rows = units, units if rows is None else min(rows, units)
        self.held: Bool[np.ndarray, " units"] = np.zeros(units, dtype=bool)
        self.clear()

    def clear(self) -> None:
        """Hold nothing, and begin again."""
        self.held.fill(False)

    def forget(self, units: Int64[np.ndarray, " some"]) -> None:  # noqa: B027 - a policy need not care
        """Take note that some units were not needed after all. A policy may drop them sooner."""

    def step(self, needed: Int64[np.ndarray, " needed"]) -> Change:
        """Hold what the next token needs, and say what to drop and to load for it.

        Raises `UserError`, and changes nothing, for units that the layer does not have, or more than memory holds.
        """
        needed = self._checked(needed)
        loaded = needed[~self.held[needed]]
        dropped = self._leaving(needed, len(loaded))
        self.held[dropped] = False
        self.held[loaded] = True
        return Change(dropped, loaded)

    def admit(self, units: Sequence[int], protect: Sequence[int] = ()) -> Change:
        """Hold units that are expected to be needed, the likeliest first, as far as there is room.

        `units` and `protect` never go, and units that find no room are left out. A unit counts as used when a step
        needs it, so that a wrong guess goes soon. Raises `UserError`, and changes nothing, for units that the layer
        does not have.
        """
        wanted, kept = (self._within(np.asarray(each, dtype=np.int64)) for each in (units, protect))
        kept = np.union1d(wanted, kept)
        idle = self.held.copy()
        idle[kept] = False
        room = self.rows - int(np.count_nonzero(self.held)) + int(np.count_nonzero(idle))
        loaded = np.array([unit for unit in dict.fromkeys(wanted.tolist()) if not self.held[unit]][:room], np.int64)
        dropped = self._first(self._order(), kept, len(loaded))
        self.held[dropped] = False
        self.held[loaded] = True
        return Change(dropped, np.sort(loaded))

    @abstractmethod
    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        """Take note of what a token needs."""

    @abstractmethod
    def _order(self) -> Shaped[np.ndarray, " units"]:
        """The lowest goes first."""

    def _leaving(self, needed: Int64[np.ndarray, " needed"], loaded: int) -> Int64[np.ndarray, " dropped"]:
        """Which units go, rising, so that `loaded` of the needed ones find room; and take note of what is needed."""
        self._note(needed)
        return self._first(self._order(), needed, loaded)

    def _first(
        self, order: Shaped[np.ndarray, " units"], needed: Int64[np.ndarray, " needed"], loaded: int
    ) -> Int64[np.ndarray, " dropped"]:
        """As few units as make room for `loaded` more: of those held and not needed, the lowest in `order`."""
        count = int(np.count_nonzero(self.held)) + loaded - self.rows
        if count <= 0:
            return np.empty(0, dtype=np.int64)
        idle = self.held.copy()
        idle[needed] = False
        candidates = np.flatnonzero(idle)
        return np.sort(candidates[np.argsort(order[candidates], kind="stable")[:count]])

    def _checked(self, needed: Int64[np.ndarray, " needed"]) -> Int64[np.ndarray, " distinct"]:
        """The units, rising and each once."""
        needed = self._within(np.unique(np.asarray(needed, dtype=np.int64)))
        if len(needed) > self.rows:
            raise UserError(
                f"one token needs {len(needed)} units, and memory holds {self.rows}: allow {len(needed)} or more"
            )
        return needed

    def _within(self, units: Int64[np.ndarray, " some"]) -> Int64[np.ndarray, " some"]:
        if len(units) and not 0 <= units.min() <= units.max() < self.units:
            raise UserError(f"units {units.min()} to {units.max()}: the layer has 0 to {self.units - 1}")
        return units


def expect_positive(**numbers: int | None) -> None:
    """Raise `UserError` for a number below 1. None is no number."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"{name}: {value}; expected 1 or more")
