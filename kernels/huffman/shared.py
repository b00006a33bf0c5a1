"""Numbers that all parts of the Huffman kernels share."""

SYMBOLS = 256  # a symbol is a byte
LONGEST = 11  # bits of a code: a table of 2^11 entries of 8 bytes stays in the first cache
EMPTY = 8  # bytes behind the codes, so that a read of 8 bytes may begin at the last of them
