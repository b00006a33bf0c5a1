"""Files that are cut, altered, foreign or inconsistent: each is refused, naming file and reason."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests import naive_formats as naive
from toolkit.formats import FORMATS, FormatError, decode, encode, load, packed


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


def test_every_truncation_is_refused(file):
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refused(file)
    file.write_bytes(whole + b"\0")
    refused(file)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_every_flipped_bit_is_refused(file, dtype, name):
    whole = bytearray(file.read_bytes())
    for place in range(len(whole)):
        for bit in range(8) if name == "endor" else [place % 8]:  # every bit once, one a byte elsewhere
            whole[place] ^= 1 << bit
            file.write_bytes(whole)
            refused(file)
            whole[place] ^= 1 << bit
    file.write_bytes(whole)
    load(file)


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
    metadata["sha256"] = packed._checksum(metadata, tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
def test_well_signed_but_wrong_headers(file, dtype, name):
    whole = file.read_bytes()
    for change, told in [
        ({"version": "9"}, f"{name} version 9; this code reads {FORMATS[name].version}"),
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
    refused(path, "endor version 1; this code reads 2")


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_a_frame_of_another_length_is_refused_before_it_is_unpacked(name, tmp_path):
    encoded = encode(name, torch.zeros(4, 8))
    bomb = FORMATS[name].compress(memoryview(bytes(64 << 20)))
    frames = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    path = tmp_path / "layer"
    dataclasses.replace(encoded, frames=frames, offsets=torch.tensor([0, len(bomb)])).save(path)
    refused(path, f"the frame holds {64 << 20} bytes; the shape asks for 128")


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(file, name, matrix, monkeypatch):
    before = file.read_bytes()

    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed.os, "replace", no_space)
    with pytest.raises(OSError, match="No space left"):
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
