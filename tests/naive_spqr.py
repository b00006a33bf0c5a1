"""SpQR's words, statistics and outliers again, element by element: slow, and plain to see right."""

import struct

import numpy as np

NAMES = ("scale of scales", "scale of zeros", "zero of scales", "zero of zeros")


def pack(weights, scales, zeros, second_order):
    """Nested lists of codes, and [tall][wide] four floats, to the words as Python integers, in their order."""
    rows, columns = len(weights), len(weights[0]) if weights else 0
    words = []
    for tall in range(-(-rows // 16)):
        for wide in range(-(-columns // 16)):
            statistics = struct.pack("<4e", *second_order[tall][wide])  # four fp16, the first lowest
            for k in range(16):
                row = 16 * tall + k
                text = "00" + f"{statistics[k // 2]:08b}"
                for j in reversed(range(16)):
                    column = 16 * wide + j
                    text += f"{weights[row][column] if row < rows and column < columns else 0:03b}"
                text += f"{zeros[row][wide] if row < rows else 0:03b}"
                text += f"{scales[row][wide] if row < rows else 0:03b}"
                words.append(int(text, 2))
    return words


def dequantise(words, rows, columns):
    """The dense part as fp16 [rows, columns]: NumPy's fp16 scalars round after every step."""
    dense = np.zeros((rows, columns), np.float16)
    wide = -(-columns // 16)
    with np.errstate(all="ignore"):
        for row in range(rows):
            for first in range(0, columns, 16):
                tile = 16 * (row // 16 * wide + first // 16)
                carried = bytes(words[tile + 2 * k] >> 54 & 255 for k in range(8))
                ss, zs, sz, zz = (np.float16(number) for number in struct.unpack("<4e", carried))
                word = words[tile + row % 16]
                scale = ss * (np.float16(word & 7) - sz)
                zero = zs * (np.float16(word >> 3 & 7) - zz)
                for k, column in enumerate(range(first, min(first + 16, columns))):
                    dense[row, column] = scale * (np.float16(word >> 6 + 3 * k & 7) - zero)
    return dense


def csr(entries, rows):
    """Sorted (row, column, fp16 value) triples to row offsets and 32-bit words."""
    offsets = [sum(row < end for row, _, _ in entries) for end in range(rows + 1)]
    return offsets, [_col_val(column, value) for _, column, value in sorted(entries)]


def ptcsr(entries, rows):
    """The same to block offsets and words: 16 rows are padded to the longest and stored column by column."""
    offsets, words = [0], []
    for first in range(0, rows, 16):
        lines = [[_col_val(c, v) for r, c, v in sorted(entries) if r == row] for row in range(first, first + 16)]
        for k in range(max(map(len, lines))):
            words += [line[k] if k < len(line) else 0 for line in lines]
        offsets.append(len(words))
    return offsets, words


def _col_val(column, value):
    """The column in the low 16 bits and the value in the high 16, as a signed 32-bit number."""
    low, high = struct.pack("<H", column), struct.pack("<e", value)
    return struct.unpack("<i", low + high)[0]
