"""The `sparse-bitmask` layout, element by element: slow, and plain to see right."""

import torch

UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
MINUS_ZERO = {
    torch.float32: 1 << 31,
    torch.float16: 1 << 15,
    torch.bfloat16: 1 << 15,
    torch.float8_e4m3fn: 1 << 7,
    torch.float8_e5m2: 1 << 7,
    torch.int8: None,
    torch.uint8: None,
}


def bits(tensor):
    """The elements' bits as (nested lists of) unsigned integers."""
    return tensor.view(UNSIGNED[tensor.element_size()]).tolist()


def sparse_bitmask(matrix):
    """bitmask, row_offsets and the bits of compressed, as lists."""
    bitmask, row_offsets, compressed = [], [], []
    for row in bits(matrix):
        line = [0] * -(-len(row) // 8)
        row_offsets.append(len(compressed))
        for column, element in enumerate(row):
            if element not in (0, MINUS_ZERO[matrix.dtype]):
                line[column // 8] |= 1 << column % 8
                compressed.append(element)
        bitmask.append(line)
    return bitmask, row_offsets, compressed


def dense_bits(matrix):
    """The bits that decoding gives: all as they were, but for −0.0."""
    return [[0 if element == MINUS_ZERO[matrix.dtype] else element for element in row] for row in bits(matrix)]
