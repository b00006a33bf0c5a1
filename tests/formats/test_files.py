"""Files that are cut, altered, foreign or inconsistent: each is refused, naming file and reason."""

import dataclasses
import json
import os
import random
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import lz4.frame
import psutil
import pytest
import torch
import zstandard
from safetensors import safe_open
from safetensors.torch import save_file

from tests import naive_formats as naive
from toolkit.errors import UserError
from toolkit.formats import FORMATS, FormatError, decode, encode, load
from toolkit.tensor_files import checksum


@pytest.fixture
def file(tmp_path, name, matrix):
    path = tmp_path / "layer.safetensors"
    encode(name, matrix).save(path)
    return path


def refused(path, *told):
    with pytest.raises(FormatError) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for part in told:
        assert part in message


def test_a_file_that_was_cut_is_refused(file):
    whole = file.read_bytes()
    for length in places(whole):
        file.write_bytes(whole[:length])
        refused(file)
    file.write_bytes(whole + b"\0")
    refused(file)


def test_a_flipped_bit_is_refused(file, name):
    whole, draw = bytearray(file.read_bytes()), random.Random(0)
    for place in places(whole):
        bit = 1 << draw.randrange(8)
        whole[place] ^= bit
        file.write_bytes(whole)
        refused(file)
        whole[place] ^= bit
    file.write_bytes(whole)
    load(file)


def places(whole, draws=64):
    """Bytes of a file: the ends of its sections and those beside them, and some drawn at random."""
    ends = [0, 8, 8 + int.from_bytes(whole[:8], "little"), len(whole)]
    near = {end + step for end in ends for step in (-1, 0, 1)}
    return sorted(
        place for place in near | set(random.Random(1).choices(range(len(whole)), k=draws)) if 0 <= place < len(whole)
    )


def test_missing_and_foreign_files(tmp_path):
    refused(tmp_path / "nothing.safetensors", "cannot be read")
    refused(tmp_path, "cannot be read")
    foreign = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2, 2)}, foreign)
    refused(foreign, "not a packed matrix", "lacks dtype, format")
    foreign.write_bytes(b"PK\x03\x04 something else entirely")
    refused(foreign, "cannot be read")


def test_a_format_asked_for_by_class_must_be_the_file_s(tmp_path):
    path = tmp_path / "layer"
    encode("csr", torch.ones(2, 4)).save(path)
    with pytest.raises(FormatError, match="holds format 'csr'; expected 'endor'"):
        FORMATS["endor"].load(path)


def rewrite(path, changed_tensors=None, **changed_metadata):
    """Alter a file and sign it again, as a faulty writer would."""
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dict)
        metadata = file.metadata()
    tensors |= changed_tensors or {}
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    metadata |= changed_metadata
    metadata["sha256"] = checksum(metadata, tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
def test_well_signed_but_wrong_headers(file, dtype, name):
    whole = file.read_bytes()
    for change, told in [
        ({"version": "9"}, f"{name} version '9'; this code reads {FORMATS[name].version}"),
        ({"format": "coo"}, "unknown format 'coo'"),
        ({"shape": "[5, 8]"}, f"inconsistent {name} file"),
        ({"shape": "[4, 5]"}, f"inconsistent {name} file"),
        ({"shape": "[-4, 8]"}, f"inconsistent {name} file"),
        ({"shape": "[4, 8, 1]"}, f"inconsistent {name} file"),
        ({"shape": "[4.0, 8]"}, f"inconsistent {name} file"),
        ({"shape": "rows"}, f"inconsistent {name} file"),
        ({"dtype": "float64"}, f"inconsistent {name} file"),
        ({"dtype": "int8"}, f"inconsistent {name} file"),
    ]:
        rewrite(file, **change)
        refused(file, told)
        file.write_bytes(whole)
    rewrite(file, {"more": torch.zeros(1)})
    refused(file, f"inconsistent {name} file")


INCONSISTENT = {
    "endor": [
        ({"row_offsets": [0, 2, 2, 5, 9]}, "offsets do not run from 0"),
        ({"row_offsets": [0, 3, 3, 5, 8]}, "row 0 has 2 bits set"),
        ({"row_offsets": [0, 2, 1, 5, 8]}, "row 1 has 0 bits set"),
        ({"row_offsets": [0, 2, 2, 5, 8, 8]}, "row_offsets is"),
        ({"block_offsets": [[0], [0], [1], [0]]}, "block 0 of row 2: its offset is not"),
        ({"block_offsets": [[0, 2], [0, 0], [0, 3], [0, 3]]}, "block_offsets is"),
        ({"bitmap": [[9, 0, 0, 0], [0, 0, 0, 0], [0b110010, 0, 0, 0], [0b1101100, 0, 0, 0]]}, "row 3 has 4 bits set"),
        ({"bitmap": [[9, 0, 0, 0], [0, 0, 0, 0], [0b110010, 0, 0, 0], [0b1100, 1, 0, 0]]}, "beyond column 8"),
        ({"values": [1, 2, 3]}, "offsets do not run from 0"),
    ],
    "csr": [
        ({"row_offsets": [0, 2, 2, 5, 9]}, "row offsets do not rise"),
        ({"row_offsets": [0, 6, 2, 5, 8]}, "row offsets do not rise"),
        # each difference is small, since it wraps; the second offset lies 2**62 values beyond the end
        ({"row_offsets": [0, 1 << 62, (1 << 63) - 1, -(1 << 63) + 8, 8]}, "row offsets do not rise"),
        ({"columns": [0, 3, 1, 4, 5, 2, 3, 8]}, "outside 0 to 7"),
        ({"columns": [3, 0, 1, 4, 5, 2, 3, 5]}, "do not rise within a row"),
        ({"columns": [0, 3, 1, 4, 4, 2, 3, 5]}, "do not rise within a row"),
        ({"columns": [0, 3, 1, 4, 5, 2, 3]}, "columns is"),
    ],
    "two_four": [
        ({"places": [0b01000000, 0b01000100, 0b01000100, 0b01001110]}, "places of a group do not rise"),
        ({"places": [0b01001100, 0b01000100, 0b01000000, 0b01001110]}, "places of a group do not rise"),
        ({"places": [0b01001100]}, "places is"),
    ],
    "zstd": [
        ({"offsets": [-(1 << 62), 1 << 62]}, "offsets do not rise"),
        ({"frames": [1, 2, 3], "offsets": [0, 3]}, "zstd frame"),
        ({"frames": [], "offsets": [0, 0]}, "zstd frame"),
        ({"offsets": [0, 1]}, "offsets do not rise"),
        ({"offsets": [0, 1, 2]}, "offsets is"),
    ],
    "lz4": [
        ({"frames": [1, 2, 3], "offsets": [0, 3]}, "lz4 frame"),
        ({"frames": [], "offsets": [0, 0]}, "lz4 frame"),
        ({"offsets": [1, 0]}, "offsets do not rise"),
        ({"offsets": []}, "offsets is"),
    ],
    "dense": [({"values": [[1, 2, 3]]}, "values is")],
}


def test_every_format_refuses_files_that_only_its_check_can_tell():
    assert INCONSISTENT.keys() == FORMATS.keys(), "add wrong tensors of the format, and what is told, to INCONSISTENT"


def test_well_signed_but_inconsistent_tensors(name, tmp_path):
    rows = [[1, 0, 0, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 3, 0, 0, 5, 6, 0, 0], [0, 0, -7, 8, 0, 9, 0, 0]]
    encoded = encode(name, torch.tensor(rows, dtype=torch.float16))
    path = tmp_path / "layer"
    for change, told in INCONSISTENT.get(name, ()):
        encoded.save(path)
        tensors = {key: torch.tensor(value).to(encoded.tensors[key].dtype) for key, value in change.items()}
        rewrite(path, tensors)
        refused(path, f"inconsistent {name} file", told)
    for key, tensor in encoded.tensors.items():
        encoded.save(path)
        rewrite(path, {key: None})
        refused(path, f"inconsistent {name} file", key)
        encoded.save(path)
        rewrite(path, {key: tensor.to(torch.float64)})
        refused(path, f"inconsistent {name} file")


def test_an_endor_file_of_version_1_is_refused_for_its_version(tmp_path):
    """It has no block offsets; the reader must not get as far as missing them."""
    path = tmp_path / "layer"
    encode("endor", torch.ones(2, 4)).save(path)
    rewrite(path, {"block_offsets": None}, version="1")
    refused(path, "endor version '1'; this code reads 2")


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_a_frame_of_another_length_is_refused_before_it_is_unpacked(name, tmp_path):
    encoded = encode(name, torch.zeros(4, 8))
    bomb = FORMATS[name].compress(memoryview(bytes(64 << 20)))
    frames = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    path = tmp_path / "layer"
    dataclasses.replace(encoded, frames=frames, offsets=torch.tensor([0, len(bomb)])).save(path)
    refused(path, f"the frame holds {64 << 20} bytes; the shape asks for 128")


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_a_frame_that_lies_about_its_length_is_unpacked_no_further_than_that(name, tmp_path):
    """The header promises 128 bytes, the blocks behind it hold 64 MiB."""
    encoded = encode(name, torch.zeros(4, 8))
    data = bytearray(FRAMES[name](bytes(64 << 20)))
    frames = torch.frombuffer(data, dtype=torch.uint8)
    path = tmp_path / "layer"
    dataclasses.replace(encoded, frames=frames, offsets=torch.tensor([0, len(data)])).save(path)
    tracemalloc.start()
    refused(path, f"inconsistent {name} file")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def _zstd_that_lies(data):
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=False).compress(data))
    assert frame[4] == 0x80  # a byte for the window and four of length follow
    frame[6:10] = (128).to_bytes(4, "little")
    return frame


def _lz4_that_lies(data):
    frame = bytearray(lz4.frame.compress(data, store_size=True))
    frame[6:14] = (128).to_bytes(8, "little")
    frame[14] = xxh32(bytes(frame[4:14])) >> 8 & 0xFF  # the header's own checksum
    return frame


FRAMES = {"zstd": _zstd_that_lies, "lz4": _lz4_that_lies}


def xxh32(data):
    """xxHash of at most 15 bytes, seed 0 (the specification at github.com/Cyan4973/xxHash)."""
    primes, mask = (2654435761, 2246822519, 3266489917, 668265263, 374761393), (1 << 32) - 1

    def rotated(value, by):
        return (value << by | value >> (32 - by)) & mask

    total = (primes[4] + len(data)) & mask
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        lane = int.from_bytes(data[at : at + 4], "little")
        total = rotated((total + lane * primes[2]) & mask, 17) * primes[3] & mask
    for byte in data[whole:]:
        total = rotated((total + byte * primes[4]) & mask, 11) * primes[0] & mask
    for shift, prime in ((15, primes[1]), (13, primes[2]), (16, 1)):
        total = (total ^ total >> shift) * prime & mask
    return total


def test_a_matrix_that_does_not_fit_into_memory_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    """41 kB of frames that stand for 1 GB."""
    frame = FORMATS["zstd"].compress(memoryview(bytes(4 << 20)))
    frames = torch.frombuffer(bytearray(256 * frame), dtype=torch.uint8)
    bomb = FORMATS["zstd"]((1 << 14, 1 << 14), torch.float32, frames, torch.arange(257) * len(frame))
    bomb.save(path := tmp_path / "layer")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=512 << 20))
    refused(path, "a dense matrix of [16384, 16384] takes 1.1 GB of memory and 0.5 GB are free")
    with pytest.raises(UserError, match=r"takes 1\.1 GB of memory"):
        bomb.decode()


@pytest.mark.parametrize(
    "shape", [[0, 1 << 50], [1 << 40, 0], [1 << 62, 4], [4, -8], [True, 8], [4.0, 8], [1 << 64, 0]]
)
def test_shapes_that_no_matrix_has_are_refused_at_once(name, shape, tmp_path):
    path = tmp_path / "layer"
    encode(name, torch.zeros(0, 8)).save(path)
    rewrite(path, shape=json.dumps(shape))
    refused(path, f"inconsistent {name} file: shape")


def test_a_shape_of_two_billion_columns_and_no_rows_takes_no_time(name, tmp_path):
    columns, path = (1 << 31) - 4, tmp_path / "layer"
    encode(name, torch.zeros(0, 8)).save(path)
    tensors = {key: tensor for key, tensor in load(path).tensors.items() if tensor.ndim == 2}
    wide = {"bitmap": -(-columns // 32) * 4, "block_offsets": -(-columns // 4096), "values": columns}
    wide |= {"values": columns // 2} if name == "two_four" else {}
    changed = {key: torch.empty(0, wide[key], dtype=tensor.dtype) for key, tensor in tensors.items()}
    if name == "csr":
        changed["columns"] = torch.empty(0, dtype=torch.int32)
    rewrite(path, changed, shape=json.dumps([0, columns]))
    assert load(path).decode().shape == (0, columns)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        refused(path, "not a regular file")


def test_more_columns_than_indices_can_count_are_refused():
    wide = torch.zeros(1, 1, dtype=torch.int8).expand(1, 1 << 31)
    for name in FORMATS:
        with pytest.raises(UserError, match=r"shape \[1, 2147483648\]; expected at most 2147483647 a dimension"):
            encode(name, wide)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(file, name, matrix, monkeypatch):
    before = file.read_bytes()

    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(UserError, match="no space left"):
        encode(name, torch.zeros(4, 8)).save(file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_saving_over_a_file_leaves_what_was_loaded_from_it_alone(file, name, matrix):
    loaded = load(file)
    encode(name, torch.zeros_like(matrix)).save(file)
    assert naive.same_bits(decode(loaded), matrix)
    assert torch.count_nonzero(decode(load(file))) == 0


def test_the_header_says_what_the_file_is(file, name, dtype):
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == name
    assert metadata["version"] == str(FORMATS[name].version)
    assert json.loads(metadata["shape"]) == [4, 8]
    assert metadata["dtype"] == str(dtype).removeprefix("torch.")
    assert len(metadata["sha256"]) == 64
