"""Methods: the format that a weight is stored in, and the processor that decodes it, if any (ENDOR, section 5)."""

from dataclasses import dataclass

from toolkit.errors import unknown

PACKED = "_packed"  # behind a format's name: products are taken with the packed form


@dataclass(frozen=True)
class Method:
    """The format that a weight is stored in, and the tier whose processor decodes it; None if it stays packed.

    `by_torch`: products are torch's, of the stored matrix, which is dense.
    """

    format: str
    decoded_in: str | None = None
    by_torch: bool = False

    @property
    def used_packed(self) -> bool:
        """Whether products are taken with the packed form."""
        return self.decoded_in is None and not self.by_torch


GGUF = "gguf"  # a file of GGUF blocks, as it is
OF_FILE = {GGUF: Method(GGUF, "dram"), f"{GGUF}{PACKED}": Method(GGUF)}
# those that the figures compare; `find_method` knows more
METHODS = {
    "dense": Method("dense", by_torch=True),
    "zstd": Method("zstd", "dram"),
    "endor_cpu": Method("endor", "dram"),
    "endor": Method("endor", "device"),
    "endor_packed": Method("endor"),  # products straight from the bitmap
}

ACCELERATE = "accelerate"
LLAMA_CPP = {f"llama.cpp {kind}": kind for kind in ("F16", "Q8_0", "Q4_0", "Q4_K", "Q3_K")}  # method -> GGUF type
# runtimes of others, with the format they store (GGUF: 16, 8.5, 4.5, 4.5, 3.44 bits a weight): measured, not modelled
RIVALS = {ACCELERATE: Method("dense", by_torch=True)} | {
    name: Method(f"gguf {kind}") for name, kind in LLAMA_CPP.items()
}


def find_method(name: str) -> Method:
    """The method of this name.

    Every registered format is a method by its own name: a CPU makes it dense. Every format with a product of its own
    is one with `_packed` behind its name: products are our kernels' there, even those of dense matrices. Raises
    `UserError`, which lists all of them, for any other name.
    """
    for table in (METHODS, OF_FILE):  # without the formats, which need torch
        if name in table:
            return table[name]
    known = known_methods()
    if name not in known:
        raise unknown("method", name, known)
    return known[name]


def usual_method(form: str, on_gpu: bool = False) -> str:
    """The name of the method that a format is run by unless one is asked for.

    On a CPU products are taken with the packed form where it has one of its own: where memory limits, a single token
    is up to three times as fast.
    """
    packed = f"{form}{PACKED}"
    return packed if packed in known_methods() and not on_gpu else form


def known_methods() -> dict[str, Method]:
    """Every method by its name."""
    from toolkit.formats import READABLE  # torch takes seconds

    decoded = {name: Method(name, "dram") for name in READABLE}
    packed = {f"{name}{PACKED}": Method(name) for name, form in READABLE.items() if form.has_matvec}
    return decoded | packed | OF_FILE | METHODS
