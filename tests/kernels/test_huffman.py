"""Codes and tables of the Huffman kernels; `test_products.py` has their products."""

import numpy as np
import pytest

from tests import naive_formats
from toolkit.kernels.huffman.code import AT_ONCE, BITS, COUNT, code_lengths, fill_codes, fill_table, is_complete
from toolkit.kernels.huffman.shared import LONGEST


def random_counts(symbols, seed):
    """Counts of some symbols, most of them much rarer than others."""
    rng = np.random.default_rng(seed)
    counts = np.zeros(256, np.int64)
    counts[rng.permutation(256)[:symbols]] = np.exp(rng.uniform(0, 12, symbols)).astype(np.int64)
    return counts


FIBONACCI = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610]  # whose best code has 14 bits


@pytest.mark.parametrize("counts", [[5, 2, 1, 0], [3], [1, 1], FIBONACCI, *(random_counts(n, n) for n in (9, 20, 40))])
def test_no_code_within_the_limit_takes_fewer_bits(counts):
    counts = np.pad(np.array(counts), (0, 256 - len(counts)))
    lengths = code_lengths(counts)
    assert is_complete(lengths)
    assert ((lengths > 0) == (counts > 0)).all()
    assert int((counts * lengths).sum()) == naive_formats.fewest_bits(counts.tolist(), LONGEST)


def test_worked_example():
    lengths = code_lengths(np.array([5, 2, 1, 0]))
    assert lengths.tolist() == [1, 2, 2, 0]
    lengths, codes = np.pad(lengths, (0, 252)), np.zeros(256, np.uint16)
    fill_codes(lengths, codes)
    assert codes[:3].tolist() == [0b0, 0b01, 0b11]  # 0, 10 and 11, the first bit lowest


@pytest.mark.parametrize("symbols", [2, 7, 60, 256])
def test_an_entry_has_all_symbols_that_fit(symbols):
    lengths = code_lengths(random_counts(symbols, symbols))
    codes, table = np.zeros(256, np.uint16), np.zeros(1 << LONGEST, np.uint64)
    fill_codes(lengths, codes)
    fill_table(lengths, table)
    known = {f"{codes[s]:0{lengths[s]}b}"[::-1]: s for s in np.flatnonzero(lengths)}
    for bits, entry in enumerate(table.tolist()):
        text, at, found = f"{bits:0{LONGEST}b}"[::-1], 0, []
        while len(found) < AT_ONCE:
            ends = [end for end in range(at + 1, LONGEST + 1) if text[at:end] in known]
            if not ends:
                break
            found.append(known[text[at : ends[0]]])
            at = ends[0]
        assert (entry >> COUNT & 15, entry >> BITS) == (len(found), at)
        assert [entry >> 8 * place & 255 for place in range(len(found))] == found


@pytest.mark.parametrize("lengths", [[1], [2], [1, 1, 1], [1, 2], [12, 12], [1, 2, 3, 3], [], [255] * 256])
def test_which_lengths_are_those_of_a_code(lengths):
    complete = is_complete(np.pad(np.array(lengths, np.uint8), (0, 256 - len(lengths))))
    assert complete == (lengths in ([], [1], [1, 2, 3, 3]))
