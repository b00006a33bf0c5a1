"""The share of weights that become zero, and their pattern. It imports no torch, so bad input is refused at once."""

import math
import re
from dataclasses import dataclass
from numbers import Real

from toolkit.errors import UserError


@dataclass(frozen=True)
class Pattern:
    """N:M: of every `group` consecutive inputs of a row at most `kept` weights stay."""

    kept: int
    group: int

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """Read "N:M". Raises `UserError` unless 0 < N < M."""
        match = re.fullmatch(r"(\d+):(\d+)", text) if isinstance(text, str) else None
        if match is None or not 0 < int(match[1]) < int(match[2]):
            raise UserError(f'pattern {text!r} is malformed; expected "N:M" with 0 < N < M, for example "2:4"')
        return cls(kept=int(match[1]), group=int(match[2]))

    @property
    def sparsity(self) -> float:
        """Share of zeros: 1 − N/M."""
        return 1 - self.kept / self.group

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.kept}:{self.group}"


def resolve(sparsity: float, text: str | None) -> tuple[float, Pattern | None]:
    """The sparsity and the pattern, if there is one. A pattern decides the sparsity; the default 0.5 is then ignored.

    Raises `UserError` for a sparsity outside [0, 1), a malformed pattern, or two that contradict each other.
    """
    if isinstance(sparsity, bool) or not isinstance(sparsity, Real) or not 0 <= sparsity < 1:
        raise UserError(f"sparsity {sparsity!r} is out of range; expected a share of zeros in [0, 1)")
    if text is None:
        return float(sparsity), None
    pattern = Pattern.parse(text)
    if sparsity != 0.5 and not math.isclose(sparsity, pattern.sparsity):
        raise UserError(f"pattern {text} means sparsity {pattern.sparsity:g}, not {sparsity:g}; leave sparsity out")
    return pattern.sparsity, pattern
