"""A hard limit on a tier's bytes: what would exceed it is refused before it is allocated."""

from toolkit.errors import UserError

MB = 1e6


class Budget:
    """Bytes of one tier, taken piece by piece. Without a limit it only counts."""

    def __init__(self, tier: str, limit_bytes: int | None = None):
        self.tier, self.limit_bytes, self.taken = tier, limit_bytes, {}

    @property
    def used_bytes(self) -> int:
        """What is taken."""
        return sum(self.taken.values())

    @property
    def left_bytes(self) -> float:
        """What can still be taken."""
        return float("inf") if self.limit_bytes is None else self.limit_bytes - self.used_bytes

    def check(self, **pieces: int) -> None:
        """Raise `UserError` unless all of these bytes can be taken; it tells what all of it needs."""
        if (asked := sum(pieces.values())) > self.left_bytes:
            parts = ", ".join(f"{name} {nbytes / MB:.1f} MB" for name, nbytes in (self.taken | pieces).items())
            raise UserError(
                f"a {self.tier} budget of {self.limit_bytes / MB:.1f} MB is too small: "
                f"{(self.used_bytes + asked) / MB:.1f} MB are needed ({parts})"
            )

    def take(self, **pieces: int) -> None:
        """Take bytes, all of the pieces or none. Raises what `check` does."""
        self.check(**pieces)
        for name, nbytes in pieces.items():
            self.taken[name] = self.taken.get(name, 0) + nbytes
