"""Models by name, folder and file; what cannot be opened is one line."""

import json

import pytest
import transformers

from tests.models.test_models import LLAMA, small
from toolkit import hub
from toolkit.errors import UserError
from toolkit.interchange.gguf import write_gguf
from toolkit.models.loading import read_config
from toolkit.models.shape_of import shape_of
from toolkit.models.skeleton import check_outline
from toolkit.planner import target as target_module
from toolkit.planner.target import open_target


@pytest.fixture
def folder(tmp_path):
    small("Llama", **LLAMA).bfloat16().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_shape_alone():
    target = open_target("mixtral-8x7b")
    assert (target.loadable, target.dtype_bytes) == (False, 2)
    assert target.nbytes == 2 * sum(target.shape.parameters.values()) > 2 * 32 * 8 * 3 * 4096 * 14336


def test_an_embedded_model_has_the_sizes_of_what_is_loaded():
    target, loaded = open_target("smollm2-135m"), []
    check_outline(read_config("smollm2-135m"), lambda outline: loaded.append(shape_of(outline)))
    assert target.shape == loaded[0]
    assert (target.loadable, target.own_thresholds) == (True, False)


def test_embedded_mixtures_by_hand():
    """One has the dense model's neurons in groups beside its routers, the other 8 FFNs of the dense model's size."""
    dense, split, upcycled = (open_target(f"smollm2-135m{name}").shape for name in ("", "-moe-split", "-moe-upcycled"))
    assert split.parameters["experts"] == dense.parameters["ffn"]
    assert upcycled.parameters["experts"] == 8 * dense.parameters["ffn"]
    assert upcycled.parameters["router"] == 30 * 8 * 576
    assert (upcycled.experts_per_token, split.experts_per_token) == (2, 8)


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


def test_an_id_on_the_hub(monkeypatch):
    config = transformers.Qwen3Config(**LLAMA, head_dim=16, dtype="bfloat16", tie_word_embeddings=True)
    monkeypatch.setattr(target_module, "read_config", lambda name: config)
    target = open_target("someone/tiny")
    assert (target.loadable, target.dtype_bytes) == (True, 2)
    assert target.shape.parameters["attention"] == 2 * 32 * 16 * (4 + 2 + 2 + 4)
    assert target.shape.parameters["head"] == 0


def test_a_packed_folder_is_for_run(tmp_path):
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(UserError, match=r"packed already; run it with `python -m toolkit run"):
        open_target(str(tmp_path))


def test_an_unknown_name_is_told_what_there_is(monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with pytest.raises(UserError, match=r"did you mean 'llama2-70b'.*cannot be reached.*mixtral-8x7b.*smollm2-135m"):
        open_target("Llama2-70B")
    with pytest.raises(UserError, match=r"unknown model 'facebook/opt-1.3b'; did you mean 'opt-1.3b'"):
        open_target("facebook/opt-1.3b")


def edited(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return str(folder)


def test_what_cannot_be_read_is_one_line(folder, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and nothing else")
    (tmp_path / "empty").mkdir()
    for name, words in {
        str(tmp_path / "broken.gguf"): "cannot be read as a GGUF file",
        str(tmp_path / "missing.gguf"): "cannot be read as a GGUF file",
        str(tmp_path / "empty"): "config.json: cannot be read",
        edited(folder, num_hidden_layers=10**8): "num_hidden_layers is 100000000",
    }.items():
        with pytest.raises(UserError, match=words) as caught:
            open_target(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"model type 't5'.*choose a shape"):
        open_target(edited(folder, model_type="t5", num_hidden_layers=2))
