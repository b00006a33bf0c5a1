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
LLAMA_CPP = {"llama.cpp F16": "F16", "llama.cpp Q8_0": "Q8_0", "llama.cpp Q4_0": "Q4_0"}  # method -> GGUF type
# Runtimes of others, with the format they store (GGUF: 2, 1.0625 and 0.5625 bytes a weight); measured, not modelled
RIVALS = {ACCELERATE: Method("dense")} | {name: Method(f"gguf {kind}") for name, kind in LLAMA_CPP.items()}
