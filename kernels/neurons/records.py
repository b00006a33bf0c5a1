"""Where the bits of a quantised neuron lie: one row of bytes, the neuron's record, which stands alone.

A record holds the neuron's gate row, up row and down column, a section each, and zeros up to a multiple of 64 bytes.
A section begins with four fp16 numbers: step and offset of the scales, step and offset of the zero points. Then come
one byte for each group's scale, one for each group's zero point, zeros up to a multiple of 8 bytes, and the codes.

    scale = step · byte + offset,   zero = step · byte + offset,   weight = scale · (code − zero)

A group is 64 consecutive weights of 4 bits or 16 of 2 bits. The codes of 64 weights are sixteen little-endian numbers
of 4 codes each: number `lane` holds the codes of weights `lane`, 16 + `lane`, 32 + `lane` and 48 + `lane`, the first in
its lowest bits. So sixteen numbers widened to 32 bits and shifted give sixteen consecutive weights, a lane each.
"""

from numba.extending import register_jitable

from toolkit.errors import UserError, unknown

BITS = (4, 2)
BLOCK = 64  # weights whose codes lie together
FIELDS, LANES = 4, 16  # codes in a number, numbers in a block
SECTIONS = 3  # gate, up, down
HEAD_BYTES = 8  # four fp16 numbers
ALIGNMENT = 64


@register_jitable
def group_of(bits: int) -> int:
    """Weights that share a scale and a zero point."""
    return 64 if bits == 4 else 16


@register_jitable
def groups(hidden: int, bits: int) -> int:
    """Groups of one section."""
    return hidden // group_of(bits)


@register_jitable
def codes_start(hidden: int, bits: int) -> int:
    """Where in a section the codes begin, in bytes."""
    return (HEAD_BYTES + 2 * groups(hidden, bits) + 7) // 8 * 8


@register_jitable
def section_bytes(hidden: int, bits: int) -> int:
    """Bytes of the gate, of the up or of the down numbers of a neuron."""
    return codes_start(hidden, bits) + hidden * bits // 8


def check_sizes(hidden: int, bits: int) -> None:
    """Raise `UserError` unless records of such neurons exist."""
    if isinstance(bits, bool) or bits not in BITS:
        raise unknown("number of bits of a neuron's codes", bits, BITS)
    if hidden < 1 or hidden % BLOCK:
        raise UserError(f"hidden is {hidden}; quantised neurons need a multiple of {BLOCK}")


def record_bytes(hidden: int, bits: int) -> int:
    """Bytes from one record to the next: a multiple of 64. 6592 for 4 bits at hidden 4096.

    Raises `UserError` for bits other than 4 and 2, and for a `hidden` that 64 does not divide.
    """
    check_sizes(hidden, bits)
    return -(-SECTIONS * section_bytes(hidden, bits) // ALIGNMENT) * ALIGNMENT
