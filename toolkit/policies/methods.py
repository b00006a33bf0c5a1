"""Methods: the format that a weight is stored in, and the processor that decodes it, if any (ENDOR, section 5)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """The format that a weight is stored in, and the tier whose processor makes it dense; None if nothing does."""

    format: str
    decoded_in: str | None = None

    @property
    def used_packed(self) -> bool:
        """Whether products are taken with the packed form."""
        return self.decoded_in is None and self.format != "dense"


METHODS = {
    "dense": Method("dense"),
    "zstd": Method("zstd", "dram"),
    "endor_cpu": Method("endor", "dram"),
    "endor": Method("endor", "device"),
    "endor_packed": Method("endor"),  # products straight from the bitmap
}

ACCELERATE = "accelerate"
RIVALS = {ACCELERATE: Method("dense")}  # runtimes of others, with the format that they store; measured, never modelled
