"""How the layers of a model share the rows of memory that hold neurons."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from toolkit.errors import UserError


@dataclass(frozen=True)
class Shares:
    """`rows` of memory for each layer; and `passing` rows that all layers without rows of their own use in turn."""

    rows: tuple[int, ...]
    passing: int

    @classmethod
    def keeping_nothing(cls, rows: int, neurons: Sequence[int]) -> Self:
        """Every layer's neurons only pass. Raises `UserError` for less than one row."""
        return cls((0,) * len(neurons), min(_at_least(1, rows), max(neurons)))

    @classmethod
    def of(cls, rows: int, needs: Sequence[int], neurons: Sequence[int], passing: int) -> Self:
        """Share so many rows among layers that have `neurons`, of which a token `needs` some.

        A layer gets at least what it needs, and what is left is shared in proportion to the needs. A layer that needs
        all its neurons gets them all or none: the first ones do, after the others have what they need. If one has none,
        `passing` rows are set apart. Raises `UserError` for less than `least`.
        """
        if rows >= sum(neurons):
            return cls(tuple(neurons), 0)
        _at_least(cls.least(needs, neurons, passing), rows)
        found = [_partial(need, count) for need, count in zip(needs, neurons, strict=True)]
        whole = [layer for layer, count in enumerate(found) if not count]
        left = rows - sum(found) - (passing := passing if whole else 0)
        for layer in whole:
            if neurons[layer] <= left:
                found[layer], left = neurons[layer], left - neurons[layer]
        return cls(tuple(_grown(found, left, needs, neurons)), passing)

    @staticmethod
    def least(needs: Sequence[int], neurons: Sequence[int], passing: int) -> int:
        """The fewest rows that can be shared."""
        found = [_partial(need, count) for need, count in zip(needs, neurons, strict=True)]
        return min(sum(neurons), sum(found) + passing * (0 in found))


def _grown(rows: list[int], left: int, needs: Sequence[int], neurons: Sequence[int]) -> list[int]:
    """Share out what is left among layers that have some rows and not all, until each has all or nothing is left."""
    while growing := [layer for layer, count in enumerate(rows) if 0 < count < neurons[layer]]:
        weights, before = {layer: max(1, needs[layer]) for layer in growing}, left
        total = sum(weights.values())
        for layer in growing:
            more = min(neurons[layer] - rows[layer], before * weights[layer] // total)
            rows[layer], left = rows[layer] + more, left - more
        if left == before:
            break
    return rows


def _partial(need: int, neurons: int) -> int:
    return max(1, need) if need < neurons else 0


def _at_least(least: int, rows: int) -> int:
    if rows < least:
        raise UserError(f"{rows} neurons fit into memory, and one token needs {least}: allow {least} or more")
    return rows
