"""Files of tensors: back as they were; altered, foreign and odd ones refused in one line."""

import os

import pytest
import torch
from safetensors.torch import save_file

from tests.refusals import refused
from toolkit import tensor_files
from toolkit.errors import UserError

TENSORS = {"a": torch.arange(6).view(2, 3), "b": torch.tensor([1.5]).bfloat16(), "none": torch.empty(0, 4)}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kept.safetensors"
    tensor_files.save(path, "test", {"model": "tiny"}, TENSORS)
    return path


def test_what_was_saved_is_loaded(file):
    about, tensors = tensor_files.load(file, "test")
    assert about == {"model": "tiny"}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_tensors_that_share_memory_are_saved_each(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"whole": whole, "again": whole, "rows": whole[1:], "turned": whole.T, "none": torch.empty(0)}
    tensor_files.save(tmp_path / "kept", "test", {}, tensors | {"nothing": torch.empty(0)})
    found = tensor_files.load(tmp_path / "kept", "test")[1]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_every_altered_byte_is_noticed(file):
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with refused("kept"):
            tensor_files.load(file, "test")


def test_files_of_another_version_or_model_are_refused(tmp_path):
    tensor_files.save(tmp_path / "kept", "test", {"version": "1", "model": "tiny"}, TENSORS)
    about, tensors = tensor_files.load_for(tmp_path / "kept", "test", ["1"], "tiny")
    assert about == {"version": "1", "model": "tiny"}
    assert tensors.keys() == TENSORS.keys()
    with pytest.raises(UserError, match="kept: test of version '1'; this code reads 2, 3: make the file again"):
        tensor_files.load_for(tmp_path / "kept", "test", ["2", "3"], "tiny")
    with pytest.raises(UserError, match="kept: test of model 'tiny'; expected 'opt': make a file for this model"):
        tensor_files.load_for(tmp_path / "kept", "test", ["1"], "opt")


def test_other_files_are_refused(file, tmp_path):
    with pytest.raises(UserError, match="holds test; expected: another"):
        tensor_files.load(file, "another")
    os.truncate(file, 100)
    with pytest.raises(UserError, match="cannot be read"):
        tensor_files.load(file, "test")
    save_file({"a": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(UserError, match="tensors of another program"):
        tensor_files.load(tmp_path / "foreign", "test")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        tensor_files.load(tmp_path / "pipe", "test")
