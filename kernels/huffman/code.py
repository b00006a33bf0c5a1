"""Huffman codes of at most 11 bits, and the tables that coding and decoding look up.

A code is canonical: the lengths alone determine it (RFC 1951, section 3.2.2). Its first bit is the lowest one.
"""

import numba
import numpy as np
from jaxtyping import Int64, UInt8

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.huffman.shared import LONGEST, SYMBOLS

# an entry of the table: symbols in its bytes 0 to 6, how many they are in the lower half of byte 7, their bits in the
# upper half
AT_ONCE = 7
COUNT, BITS = 56, 60


def code_lengths(counts: Int64[np.ndarray, " symbols"]) -> UInt8[np.ndarray, " symbols"]:
    """The bits of each symbol's code, 0 of symbols that do not occur: no code of at most 11 bits needs fewer in all.

    The package-merge algorithm (Larmore and Hirschberg, "A Fast Algorithm for Optimal Length-Limited Huffman Codes",
    J. ACM 1990). A symbol that is alone gets one bit.

        counts  5, 2, 1, 0      lengths  1, 2, 2, 0
    """
    leaves = sorted((int(count), (symbol,)) for symbol, count in enumerate(counts) if count)
    lengths = np.zeros(len(counts), np.uint8)
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(LONGEST):
        pairs = zip(packages[::2], packages[1::2], strict=False)
        packages = sorted(leaves + [(one + other, some + more) for (one, some), (other, more) in pairs])
    for _, symbols in packages[: max(2 * len(leaves) - 2, len(leaves))]:
        np.add.at(lengths, list(symbols), 1)
    return lengths


@compiled
def fill_codes(lengths, codes):
    """Set the code of each symbol, its first bit lowest. Lengths above 11 and codes too many are cut to any bits."""
    code = 0
    for length in range(1, LONGEST + 1):
        for symbol in range(SYMBOLS):
            if lengths[symbol] == length:
                turned = 0
                for bit in range(length):
                    turned |= (code >> bit & 1) << (length - 1 - bit)
                codes[symbol] = turned
                code += 1
        code <<= 1


@compiled
def fill_table(lengths, table):
    """Set the entry of each 11 bits: the symbols whose codes these begin with, as many as there is room for.

    Every entry has a symbol, so that a decoder gets on whatever it reads. One that no code begins has symbol 0.
    """
    codes, single = np.zeros(SYMBOLS, np.uint16), np.full(1 << LONGEST, 1 << 8, np.uint16)
    fill_codes(lengths, codes)
    for symbol in range(SYMBOLS):
        length = lengths[symbol]
        if 0 < length <= LONGEST:
            for high in range(1 << (LONGEST - length)):
                single[codes[symbol] | high << length] = symbol | length << 8
    for bits in range(1 << LONGEST):
        entry, count, used = numba.uint64(0), 0, 0
        while count < AT_ONCE:
            found = single[bits >> used]
            if used + (found >> 8) > LONGEST:
                break
            entry |= numba.uint64(found & 0xFF) << numba.uint64(8 * count)
            used += found >> 8
            count += 1
        table[bits] = entry | numba.uint64(count) << numba.uint64(COUNT) | numba.uint64(used) << numba.uint64(BITS)


def is_complete(lengths: UInt8[np.ndarray, " symbols"]) -> bool:
    """Whether each sequence of bits is one of codes, or whether there are no codes, or one of a single bit."""
    used = lengths[lengths > 0].astype(np.int64)
    if len(used) < 2:
        return bool((used == 1).all())
    return bool(used.max() <= LONGEST) and int((1 << (LONGEST - used)).sum()) == 1 << LONGEST
