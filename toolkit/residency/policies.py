"""The residency policies, by name. Each decides which units go first when memory is full."""

from collections.abc import Sequence
from inspect import signature

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from toolkit.errors import UserError, unknown
from toolkit.residency.base import Residency, expect_positive


class Lru(Residency):
    """Least recently used: the units used longest ago go first. Units used by the same token go in their order."""

    never = -1  # the last use of a unit that was not used

    def clear(self) -> None:
        """Hold nothing, and begin again."""
        super().clear()
        self.now, self.last_use = 0, np.full(self.units, self.never)

    def forget(self, units: Int64[np.ndarray, " some"]) -> None:
        """These units go before all others."""
        self.last_use[units] = self.never

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        self.last_use[needed] = self.now
        self.now += 1

    def _order(self) -> Int64[np.ndarray, " units"]:
        return self.last_use


class SlidingWindow(Lru):
    """Keeps the units that the last `tokens` tokens used, as far as `rows` units of memory allow (FLASH, section 3.1).

    The window counts the current token. So a token loads s_agg(k + 1) − s_agg(k) units on average, and s_agg(k) stay.

    When `rows` do not suffice, the window shrinks for this token: the units used longest ago go first, all those that
    were last used by the same token together (appendix C.3). Later it grows again. More than `rows` units are never
    held, not even between dropping and loading. `last_use` is the paper's last_k_active.
    """

    def __init__(self, units: int, tokens: int, rows: int | None = None):
        expect_positive(tokens=tokens)
        self.tokens, self.never = tokens, -tokens
        super().__init__(units, rows)

    def forget(self, units: Int64[np.ndarray, " some"]) -> None:
        """Let some units go at the next step, as if no token of the window had used them."""
        self.last_use[units] = self.now - self.tokens

    def _leaving(self, needed: Int64[np.ndarray, " needed"], loaded: int) -> Int64[np.ndarray, " dropped"]:
        age = np.where(self.held, self.now - self.last_use, self.tokens)  # in tokens; 1 is the token before this one
        age[needed] = 0
        holding = np.bincount(age, minlength=self.tokens)[: self.tokens].cumsum()  # units younger than age + 1
        allowed = max(1, int((holding <= self.rows).sum()))
        self._note(needed)
        return np.flatnonzero(self.held & (age >= allowed))


class Lfu(Residency):
    """Least frequently used: the units that the fewest tokens used so far go first; of equal ones the first.

    Uses are counted since the start, also while a unit is not held.
    """

    def clear(self) -> None:
        """Hold nothing, and forget all counts."""
        super().clear()
        self.uses = np.zeros(self.units, dtype=np.int64)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        self.uses[needed] += 1

    def _order(self) -> Int64[np.ndarray, " units"]:
        return self.uses


class Lrfu(Residency):
    """Least recently and frequently used: the lowest counts of uses go first; they halve every `half_life` tokens.

    A short half-life makes it LRU, a long one LFU (Lee et al., "LRFU", IEEE Transactions on Computers 50(12), 2001).
    """

    def __init__(self, units: int, rows: int | None = None, *, half_life: float = 16):
        expect_positive(half_life=half_life)
        self.kept = 0.5 ** (1 / half_life)
        super().__init__(units, rows)

    def clear(self) -> None:
        """Hold nothing, and forget all counts."""
        super().clear()
        self.uses = np.zeros(self.units)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        self.uses *= self.kept
        self.uses[needed] += 1

    def _order(self) -> Float64[np.ndarray, " units"]:
        return self.uses


class Learned(Lrfu):
    """Units that are the least likely to be needed next go first, by a logistic regression that learns as it goes.

    It sees what FlashMoE's learned cache sees, how recently and how often a unit was used (arXiv 2601.17063; there a
    network is trained beforehand to imitate Belady). The features of a unit are 1, 1 / (tokens since its last use), the
    share of all tokens that used it, and the faded count of `Lrfu` over its largest value. After each token the weights
    take a step towards what the token needed.
    """

    rate = 0.5
    start = (-2.0, 1.0, 1.0, 1.0)

    def clear(self) -> None:
        """Hold nothing, and learn anew."""
        super().clear()
        self.now, self.last_use, self.all_uses = 0, np.full(self.units, -np.inf), np.zeros(self.units)
        self.weights = np.array(self.start)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        features = self._features()
        wrong = -1 / (1 + np.exp(-self.weights @ features))
        wrong[needed] += 1
        self.weights += self.rate * (features @ wrong) / max(1, len(needed))
        super()._note(needed)
        self.all_uses[needed] += 1
        self.last_use[needed] = self.now
        self.now += 1

    def _order(self) -> Float64[np.ndarray, " units"]:
        return self.weights @ self._features()

    def _features(self) -> Float64[np.ndarray, "4 units"]:
        recent, often = 1 / (self.now - self.last_use), self.all_uses / max(1, self.now)
        return np.stack([np.ones(self.units), recent, often, self.uses * (1 - self.kept)])


class LeastStale(Lru):
    """For one cache of `layers` layers: the units whose layer came up most often without using them go first.

    Unit u belongs to layer u // (units / layers). A step is one layer, in order. LRU fails in such a cache: the units
    needed next are those used longest ago, one token before. The name and the idea are SpecMD's (arXiv 2602.03921,
    2026). In a cache of one layer it is LRU.

    The units that missed the most turns of their layer since their last use go first; among equal ones, those whose
    layer comes up again last. Raises `UserError` for units that do not divide into the layers, and `step` for units of
    a layer that is not the next one.
    """

    def __init__(self, units: int, rows: int | None = None, *, layers: int = 1):
        expect_positive(units=units, layers=layers)
        if units % layers:
            raise UserError(f"{units} units in {layers} layers: expected as many in each layer")
        self.layers, self.never, self.layer_of = layers, -layers, np.arange(units) // (units // layers)
        super().__init__(units, rows)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        layer = self.now % self.layers
        if len(needed) and (self.layer_of[needed] != layer).any():
            raise UserError(f"units {needed.tolist()} at the turn of layer {layer}: expected units of this layer")
        super()._note(needed)

    def _order(self) -> Int64[np.ndarray, " units"]:
        missed = (self.now - 1 - self.last_use) // self.layers
        until = (self.layer_of - self.now) % self.layers + 1  # turns until the layer comes up again
        return -(missed * (self.layers + 1) + until)


class RandomChoice(Residency):
    """Units that are not needed go at random: the baseline for every policy. A seed repeats its choices."""

    def __init__(self, units: int, rows: int | None = None, *, seed: int = 0):
        self.seed = seed
        super().__init__(units, rows)

    def clear(self) -> None:
        """Hold nothing, and draw again from the start."""
        super().clear()
        self._draws = np.random.default_rng(self.seed)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        """Chance learns nothing."""

    def _order(self) -> Float64[np.ndarray, " units"]:
        return self._draws.random(self.units)


class HotTable(Residency):
    """Units of the lowest state (`TokenState`) go first; of equal ones the first (Hermes, section IV-C)."""

    def clear(self) -> None:
        """Hold nothing; all states are 0."""

        from toolkit.predictors.states import TokenState  # its package imports torch

        super().clear()
        self.table = TokenState(self.units, hidden=0)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        self.table.observe(needed)

    def _order(self) -> UInt8[np.ndarray, " units"]:
        return self.table.states


class Static(Residency):
    """Units of the lowest `frequency` [units] on other text go first (Hermes's offline mapping, PowerInfer's).

    The most frequent units stay once they were needed, and the others pass. Raises `UserError` unless each unit has
    a frequency.
    """

    def __init__(self, units: int, rows: int | None = None, *, frequency: Float64[np.ndarray, " units"]):
        self.frequency = np.asarray(frequency, dtype=np.float64)
        if self.frequency.shape != (units,) or np.isnan(self.frequency).any():
            raise UserError(f"frequencies {list(self.frequency.shape)}: expected {units} numbers, one for each unit")
        super().__init__(units, rows)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        """A static choice learns nothing."""

    def _order(self) -> Float64[np.ndarray, " units"]:
        return self.frequency


class Belady(Residency):
    """The offline optimum: it knows the future, and drops the units that are needed again last (Belady, 1966).

    No policy that loads on demand loads less with the same memory. `future` are the units that each token needs, the
    first token first.

    `step` must be called with these tokens in their order. Raises `UserError` for a token that differs or follows the
    last one.
    """

    def __init__(self, units: int, rows: int | None = None, *, future: Sequence[Int64[np.ndarray, " needed"]]):
        self.future = [np.unique(np.asarray(needed, dtype=np.int64)) for needed in future]
        self._uses = _uses_after(self.future, units)
        super().__init__(units, rows)

    def clear(self) -> None:
        """Hold nothing, and begin again with the first token."""
        super().clear()
        self.now, self.next_use = 0, np.full(self.units, len(self.future))

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        if self.now >= len(self.future) or not np.array_equal(needed, self.future[self.now]):
            raise UserError(f"token {self.now} needs other units than the future that Belady was given")
        self.next_use[needed] = self._uses[self.now]
        self.now += 1

    def _order(self) -> Int64[np.ndarray, " units"]:
        return -self.next_use


def _uses_after(future: Sequence[Int64[np.ndarray, " needed"]], units: int) -> list[Int64[np.ndarray, " needed"]]:
    """For each token and unit that it needs, the next token that needs the unit; the number of tokens if none does."""
    for unit in (int(each) for needed in future if len(needed) for each in needed[[0, -1]]):
        if not 0 <= unit < units:
            raise UserError(f"the future needs unit {unit}: the layer has 0 to {units - 1}")
    following, uses = np.full(units, len(future)), []
    for number in range(len(future) - 1, -1, -1):
        uses.append(following[future[number]])
        following[future[number]] = number
    return uses[::-1]


RESIDENCIES: dict[str, type[Residency]] = {
    "window": SlidingWindow,
    "lru": Lru,
    "lfu": Lfu,
    "lrfu": Lrfu,
    "learned": Learned,
    "least_stale": LeastStale,
    "random": RandomChoice,
    "hot_table": HotTable,
    "static": Static,
    "belady": Belady,
}


def online() -> list[str]:
    """The policies that know nothing beforehand: neither the tokens that come nor how often each unit is used."""
    return [
        name for name, kind in RESIDENCIES.items() if not {"future", "frequency"} & signature(kind).parameters.keys()
    ]


def residency_of(
    name: str,
    units: int,
    rows: int,
    needed: Sequence[Int64[np.ndarray, " needed"]] = (),
    frequency: Float64[np.ndarray, " units"] | None = None,
    window: int = 5,
) -> Residency:
    """A policy by its name, with those of the settings below that its class takes.

    Args:
        units: neurons or experts of a layer.
        rows: units that memory holds.
        needed: the units of each token, for classes that take the `future`.
        frequency: how often each unit is used, for classes that take it.
        window: for classes that take a number of `tokens`.

    Raises `UserError` for an unknown policy.
    """
    if name not in RESIDENCIES:
        raise unknown("residency policy", name, RESIDENCIES)
    kind, settings = RESIDENCIES[name], {"tokens": window, "frequency": frequency, "future": needed}
    return kind(units, rows=rows, **{key: settings[key] for key in settings.keys() & signature(kind).parameters.keys()})
