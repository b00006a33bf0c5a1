"""Models by name, folder and file; what cannot be opened is one line."""

import json

import pytest

from tests.models.test_models import LLAMA, small
from toolkit import hub
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


def test_a_sparse_model_has_thresholds_and_the_dense_sizes():
    sparse, dense = open_target("smollm2-135m-sparse90"), open_target("smollm2-135m")
    assert sparse.shape == dense.shape
    assert sparse.own_thresholds
    assert sparse.zeros == pytest.approx(0.9, abs=0.01)
    assert dense.zeros is None


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


def test_an_unknown_name_is_told_what_there_is(monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with pytest.raises(UserError, match=r"did you mean 'llama2-70b'.*cannot be reached.*mixtral-8x7b.*smollm2-135m"):
        open_target("Llama2-70B")
    with pytest.raises(UserError, match=r"unknown model 'facebook/opt-1.3b'; did you mean 'opt-1.3b'"):
        open_target("facebook/opt-1.3b")


def test_what_cannot_be_opened_is_one_line(folder, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and nothing else")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**8}))
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "index.json").write_text("{}")
    for name, words in (
        ("broken.gguf", "cannot be read as a GGUF file"),
        ("tiny", "num_hidden_layers is 100000000"),
        ("packed", "packed already; run it with `python -m toolkit run"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            open_target(str(tmp_path / name))
        assert "\n" not in str(caught.value)
