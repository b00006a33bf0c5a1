"""Models by name, folder and file; what cannot be opened is one line."""

import pytest

from tests.models.test_models import LLAMA, small
from toolkit.errors import UserError
from toolkit.interchange.gguf import write_gguf
from toolkit.planner.target import open_target


@pytest.fixture
def folder(tmp_path):
    small("Llama", **LLAMA).bfloat16().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_embedded_mixture_by_hand():
    """It has 8 FFNs of the dense model's size, and routers."""
    dense, upcycled = (open_target(f"smollm2-135m{name}").shape for name in ("", "-moe-upcycled"))
    assert upcycled.parameters["experts"] == 8 * dense.parameters["ffn"]
    assert upcycled.parameters["router"] == 30 * 8 * 576
    assert upcycled.experts_per_token == 2


def test_a_folder(folder):
    target = open_target(str(folder))
    assert (target.loadable, target.dtype_bytes) == (True, 2)
    assert target.shape.parameters["ffn"] == 2 * 3 * 32 * 48
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert not open_target(str(folder)).loadable


def test_a_gguf_file(folder, tmp_path):
    write_gguf(small("Llama", **LLAMA).half().requires_grad_(False), tmp_path / "tiny.gguf")
    target = open_target(str(tmp_path / "tiny.gguf"))
    assert (target.loadable, target.dtype_bytes) == (True, 2)
    assert target.shape == open_target(str(folder)).shape


def test_a_packed_folder_is_run_and_not_planned(tmp_path):
    """`tests/test_foreign_files.py` has files that cannot be read."""
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(UserError, match="packed already; run it with `python -m toolkit run"):
        open_target(str(tmp_path))
