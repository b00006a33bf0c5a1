"""The facts of its source that a packed folder holds."""

import hashlib

import torch
from gguf_files import CASES, write

from tests.families import write_family
from toolkit.models.origin import origin


def test_a_gguf_file_by_hand(tmp_path):
    """Blocks of Q8_0 have 34 bytes for 32 weights: 8.5 bits; norms have 32."""
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf", "Q8_0")
    found = origin(str(file))
    assert found["bytes"] == file.stat().st_size
    assert found["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert found["sha256_of"] == "the files"
    assert 8.5 < found["bits_a_weight"] < 9


def test_headers_and_sizes_tell_folders_apart(tmp_path):
    for name, family in (("one", "Qwen2"), ("same", "Qwen2"), ("other", "Llama, tied")):
        write_family(family, tmp_path / name, torch.float32)
    one, same, other = (origin(str(tmp_path / name)) for name in ("one", "same", "other"))
    assert one["bytes"] == (tmp_path / "one" / "model.safetensors").stat().st_size
    assert one["sha256"] == same["sha256"] != other["sha256"]
    assert one["sha256_of"] == "headers and sizes"
    assert origin("somebody/model") == {"name": "somebody/model"}
