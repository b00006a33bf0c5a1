"""A hard limit on the bytes of a tier. Memory beyond the limit is refused before it is allocated."""

from math import ceil

from toolkit.errors import UserError

MB = 1e6


class BudgetError(UserError):
    """A tier's budget is smaller than the bytes needed in total, `needed_bytes`."""

    def __init__(self, message: str, needed_bytes: int):
        super().__init__(message)
        self.needed_bytes = needed_bytes


class Budget:
    """Bytes of one tier that are taken piece by piece. Without a limit they are only counted."""

    def __init__(self, tier: str, limit_bytes: int | None = None):
        self.tier, self.limit_bytes, self.taken = tier, limit_bytes, {}

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        return sum(self.taken.values())

    @property
    def left_bytes(self) -> float:
        """Bytes that can still be taken."""
        return float("inf") if self.limit_bytes is None else self.limit_bytes - self.used_bytes

    def check(self, **pieces: int) -> None:
        """Raise `BudgetError` unless all of these bytes can be taken. The message lists all bytes that are needed."""
        if (asked := sum(pieces.values())) > self.left_bytes:
            all_of = {name: self.taken.get(name, 0) + pieces.get(name, 0) for name in self.taken | pieces}
            parts = ", ".join(f"{name} {nbytes / MB:.1f} MB" for name, nbytes in all_of.items())
            needed = self.used_bytes + asked
            raise BudgetError(
                f"a {self.tier} budget of {self.limit_bytes / MB:.1f} MB is too small: "
                f"{ceil(10 * needed / MB) / 10:.1f} MB are needed ({parts})",  # rounded up: enough
                needed,
            )

    def take(self, **pieces: int) -> None:
        """Take the bytes of all pieces, or of none. Raises what `check` raises."""
        self.check(**pieces)
        for name, nbytes in pieces.items():
            self.taken[name] = self.taken.get(name, 0) + nbytes
