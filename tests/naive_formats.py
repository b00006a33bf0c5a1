"""The formats and their kernels again, element by element: slow, and plain to see right."""

import torch

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.int8: torch.int8}
MINUS_ZERO = {torch.float32: -(2**31), torch.float16: -(2**15), torch.bfloat16: -(2**15), torch.int8: None}
SPARSE = ("endor", "csr", "two_four")  # these take −0.0 for zero


def bits(matrix):
    """The elements' bits as nested lists of Python integers."""
    return matrix.view(BITS[matrix.dtype]).tolist() if matrix.numel() else [[] for _ in range(matrix.shape[0])]


def is_zero(element, dtype):
    return element in (0, MINUS_ZERO[dtype])


def canonical(matrix):
    """The same matrix with −0.0 replaced by +0.0."""
    rows = [[0 if is_zero(e, matrix.dtype) else e for e in row] for row in bits(matrix)]
    return torch.tensor(rows, dtype=BITS[matrix.dtype]).view(matrix.dtype).reshape(matrix.shape)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def endor(matrix):
    """Bitmap bytes per row, row offsets, block offsets, bits of the values."""
    bitmap, offsets, blocks, values = [], [0], [], []
    for row in bits(matrix):
        packed = [0] * (-(-len(row) // 32) * 4)
        blocks.append([])
        for column, element in enumerate(row):
            if column % 4096 == 0:
                blocks[-1].append(len(values) - offsets[-1])
            if not is_zero(element, matrix.dtype):
                packed[column // 8] |= 1 << column % 8
                values.append(element)
        bitmap.append(packed)
        offsets.append(len(values))
    return bitmap, offsets, blocks, values


def csr(matrix):
    """Row offsets, columns, bits of the values."""
    offsets, columns, values = [0], [], []
    for row in bits(matrix):
        for column, element in enumerate(row):
            if not is_zero(element, matrix.dtype):
                columns.append(column)
                values.append(element)
        offsets.append(len(values))
    return offsets, columns, values


def two_four(matrix):
    """Bits of the kept values per row, bytes of the places."""
    values, places = [], []
    for row in bits(matrix):
        kept_values = []
        for start in range(0, len(row), 4):
            group = [0 if is_zero(e, matrix.dtype) else e for e in row[start : start + 4]]
            kept = [place for place in range(4) if group[place]]
            kept += [place for place in range(4) if not group[place]][: 2 - len(kept)]
            for place in sorted(kept):
                kept_values.append(group[place])
                places.append(place)
        values.append(kept_values)
    packed = [0] * -(-len(places) // 4)
    for index, place in enumerate(places):
        packed[index // 4] |= place << 2 * (index % 4)
    return values, packed


def huffman(matrix, lengths):
    """Bytes of the codes, row offsets, and bytes of the rest, for codes of these lengths (RFC 1951, section 3.2.2)."""
    width, codes, code = 8 * matrix.element_size(), {}, 0
    for length in range(1, 12):
        for symbol in [s for s in range(256) if lengths[s] == length]:
            codes[symbol] = f"{code:0{length}b}"
            code += 1
        code *= 2
    stream, offsets, rest = "", [0], []
    for row in bits(matrix):
        row = [element % (1 << width) for element in row]
        coded = row if width == 8 else [element >> width - 9 & 0xFF for element in row]
        stream += "0" * (-len(stream) % 8) + "".join(codes[symbol] for symbol in coded)
        offsets.append(len(stream))
        signs = [element >> width - 1 for element in row]
        rest.append([element & 0xFF for element in row] if width == 32 else [])
        rest[-1] += [element >> 8 & 0xFF for element in row] if width == 32 else []
        if width > 8:
            rest[-1] += [s << 7 | element >> width - 16 & 0x7F for s, element in zip(signs, row, strict=True)]
    stream += "0" * (-len(stream) % 8)
    first_bit_lowest = [int(stream[at : at + 8][::-1], 2) for at in range(0, len(stream), 8)]
    return first_bit_lowest + [0] * 8, offsets, rest


def fewest_bits(counts, longest):
    """The bits that symbols of these counts take in the best prefix code whose codes have at most so many bits."""
    room = {1 << longest: 0}  # what is left of Kraft's sum, and the fewest bits so far
    for count in filter(None, counts):
        found = {}
        for left, total in room.items():
            for length in range(1, longest + 1):
                if (after := left - (1 << longest - length)) >= 0:
                    found[after] = min(found.get(after, total + count * length), total + count * length)
        room = found
    return min(room.values())


def matvec(matrix, x):
    """The product in double precision, and the sum of the terms' magnitudes, to which rounding errors are relative."""
    products = matrix.double() * x.double()
    return products.sum(1), products.abs().sum(1)
