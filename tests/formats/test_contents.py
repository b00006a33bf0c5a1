"""Stored tensors that do not fit each other or the shape: each is refused with the reason."""

import tracemalloc
from types import SimpleNamespace

import psutil
import pytest
import torch
import zstandard

from toolkit.errors import UserError
from toolkit.formats import FORMATS, encode


def of_parts(packed, **changes):
    """The matrix made anew of its parts, some of them changed, and checked as a store does."""
    parts = {"shape": packed.shape, "dtype": packed.dtype, "tensors": packed.tensors} | changes
    again = type(packed).of_parts(*parts.values())
    again.check()
    return again


def refused(packed, *words, **changes):
    with pytest.raises((ValueError, TypeError)) as caught:
        of_parts(packed, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_wrong_shapes_and_types(name, matrix):
    packed = encode(name, matrix)
    for shape in ((5, 8), (4, 5), (-4, 8), (4.0, 8), (1 << 62, 4), (4, 1 << 40), (True, 8)):
        refused(packed, shape=shape)
    for dtype in (torch.float64, next(other for other in (torch.int8, torch.float32) if other != packed.dtype)):
        refused(packed, dtype=dtype)
    refused(packed, tensors=packed.tensors | {"more": torch.zeros(1)})
    for key, tensor in packed.tensors.items():
        refused(packed, key, tensors={other: it for other, it in packed.tensors.items() if other != key})
        refused(packed, tensors=packed.tensors | {key: tensor.to(torch.float64)})


INCONSISTENT = {
    "endor": [
        ({"row_offsets": [0, 2, 2, 5, 9]}, "offsets do not run from 0"),
        ({"row_offsets": [0, 3, 3, 5, 8]}, "row 0 has 2 bits set"),
        ({"block_offsets": [[0], [0], [1], [0]]}, "block 0 of row 2: its offset is not"),
        ({"bitmap": [[9, 0, 0, 0], [0, 0, 0, 0], [0b110010, 0, 0, 0], [0b1100, 1, 0, 0]]}, "beyond column 8"),
        ({"values": [1, 2, 3]}, "offsets do not run from 0"),
    ],
    "csr": [
        ({"row_offsets": [0, 6, 2, 5, 8]}, "row offsets do not rise"),
        # each difference is small, since it wraps; the second offset lies 2**62 values beyond the end
        ({"row_offsets": [0, 1 << 62, (1 << 63) - 1, -(1 << 63) + 8, 8]}, "row offsets do not rise"),
        ({"columns": [0, 3, 1, 4, 5, 2, 3, 8]}, "outside 0 to 7"),
        ({"columns": [3, 0, 1, 4, 5, 2, 3, 5]}, "do not rise within a row"),
        ({"columns": [0, 3, 1, 4, 5, 2, 3]}, "columns is"),
    ],
    "two_four": [
        ({"places": [0b01000000, 0b01000100, 0b01000100, 0b01001110]}, "places of a group do not rise"),
        ({"places": [0b01001100]}, "places is"),
    ],
    "huffman": [
        ({"row_offsets": [0, 1, 2, 3, 4]}, "the codes end at"),
        ({"lengths": [1] * 256}, "lengths are those of no code"),
        ({"lengths": [12] * 256}, "lengths are those of no code"),
        ({"lengths": [0] * 256}, "the codes end at"),
        ({"coded": [0] * 7}, "coded is"),
        ({"coded": [0] * 100}, "the codes end at"),
        ({"rest": [[1, 2, 3]]}, "rest is"),
    ],
    "zstd": [
        ({"offsets": [-(1 << 62), 1 << 62]}, "offsets do not rise"),
        ({"frames": [1, 2, 3], "offsets": [0, 3]}, "zstd frame"),
        ({"offsets": [0, 1, 2]}, "offsets is"),
    ],
    "dense": [({"values": [[1, 2, 3]]}, "values is")],
}


def test_tensors_that_disagree(name):
    rows = [[1, 0, 0, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 3, 0, 0, 5, 6, 0, 0], [0, 0, -7, 8, 0, 9, 0, 0]]
    packed = encode(name, torch.tensor(rows, dtype=torch.float16))
    for change, words in INCONSISTENT[name]:
        changed = {key: torch.tensor(value).to(packed.tensors[key].dtype) for key, value in change.items()}
        refused(packed, words, tensors=packed.tensors | changed)


def test_a_frame_of_another_length_is_refused_before_it_is_unpacked():
    """One frame says that it holds 64 MiB; one promises 128 bytes and holds 64 MiB."""
    packed = encode("zstd", torch.zeros(4, 8))
    bomb = FORMATS["zstd"].compress(memoryview(bytes(64 << 20)))
    for data, words in ((bomb, f"the frame holds {64 << 20} bytes; the shape asks for 128"), (_zstd_that_lies(), "")):
        frames = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tracemalloc.start()
        refused(packed, words, tensors={"frames": frames, "offsets": torch.tensor([0, len(data)])})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()


def _zstd_that_lies():
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=False).compress(bytes(64 << 20)))
    assert frame[4] == 0x80  # a byte for the window and four of length follow
    frame[6:10] = (128).to_bytes(4, "little")
    return frame


def test_a_matrix_that_does_not_fit_into_memory_is_refused_before_it_is_unpacked(monkeypatch):
    """41 kB of frames that stand for 1 GB."""
    frame = FORMATS["zstd"].compress(memoryview(bytes(4 << 20)))
    frames = torch.frombuffer(bytearray(256 * frame), dtype=torch.uint8)
    bomb = FORMATS["zstd"]((1 << 14, 1 << 14), torch.float32, frames, torch.arange(257) * len(frame))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=512 << 20))
    for call in (bomb.check, bomb.decode):
        with pytest.raises(UserError, match=r"takes 1\.1 GB of memory and 0\.5 GB are free"):
            call()


def test_a_shape_of_two_billion_columns_and_no_rows_takes_no_time(name):
    columns, packed = (1 << 31) - 4, encode(name, torch.zeros(0, 8))
    wide = {"bitmap": -(-columns // 32) * 4, "block_offsets": -(-columns // 4096), "values": columns}
    wide |= {"values": columns // 2} if name == "two_four" else {}
    wide |= {"rest": 3 * columns}
    flat = {key: tensor for key, tensor in packed.tensors.items() if tensor.ndim == 2}
    changed = {key: torch.empty(0, wide[key], dtype=tensor.dtype) for key, tensor in flat.items()}
    if name == "csr":
        changed["columns"] = torch.empty(0, dtype=torch.int32)
    assert of_parts(packed, shape=(0, columns), tensors=packed.tensors | changed).decode().shape == (0, columns)


def test_more_columns_than_indices_can_count_are_refused():
    wide = torch.zeros(1, 1, dtype=torch.int8).expand(1, 1 << 31)
    for name in FORMATS:
        with pytest.raises(UserError, match=r"shape \[1, 2147483648\]; expected at most 2147483647 a dimension"):
            encode(name, wide)
