"""GGUF files as models: files that lack something or ask for too much, and what is kept of a file.

`tests/offload/test_gguf_readers.py` compares the logits of every architecture.
"""

import gguf_files
import pytest
import torch
from gguf_files import CASES, FFN, HIDDEN, Case

from tests.refusals import refused
from toolkit.models import gguf_tokenizer, load_model
from toolkit.models.gguf_header import read_header


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(without, more, **keys)` writes a small Qwen2 with other tensors and keys, and returns its file."""
    model, tensors = CASES["qwen2"].model(), gguf_files.tensors

    def write(without="", more=None, architecture="qwen2", **keys):
        def changed(*_):
            found = dict(tensors(model, "qwen2"))
            found.pop(without, None)
            return (found | {name: torch.ones(shape) for name, shape in (more or {}).items()}).items()

        monkeypatch.setattr(gguf_files, "tensors", changed)
        gguf_files.write(model, Case(architecture, "qwen2"), tmp_path / "tiny.gguf", **keys)
        return tmp_path / "tiny.gguf"

    return write


def test_a_file_is_dequantised_once_whatever_its_name(write, tmp_path, monkeypatch):
    load_model(str(write()))
    (tmp_path / "tiny.gguf").rename(tmp_path / "other")
    monkeypatch.setattr("toolkit.models.gguf.read", lambda *_: pytest.fail("dequantised again"))
    load_model(str(tmp_path / "other"))


FAULTY = {
    "a tensor less": ({"without": "blk.1.ffn_up.weight"}, r"lacks 1 of the model's tensors, such as .*1.mlp.up_proj"),
    "a block more": ({"more": {"blk.2.attn_norm.weight": (HIDDEN,)}}, r"block_count is 2; expected 3, the blocks that"),
    "another shape": ({"feed_forward_length": FFN - 2}, r"'blk.0.ffn_gate.weight' is 96 × 64, .* 94 × 64 there$"),
    "factors of another size": ({"more": {"rope_freqs.weight": (16,)}}, r"rope_freqs.weight has shape \(16,\)"),
    "architecture": ({"architecture": "deepseek2"}, "reads no GGUF file of architecture 'deepseek2'"),
    "key": ({"attention__max_alibi_bias": 8}, r"qwen2.attention.max_alibi_bias is 8; expected none: .*cannot apply"),
    "blocks": ({"block_count": 2**30}, r"block_count is 1073741824; expected a whole number from 0 to 128"),
    "text": ({"expert_used_count": "abc"}, "expert_used_count is 'abc'"),
}


def test_a_faulty_file_is_one_line(write):
    for changes, words in FAULTY.values():
        with refused(words) as caught:
            load_model(str(write(**changes)))
        assert "hub" not in str(caught.value)


def test_the_tokenizer_of_a_file_is_built_once_and_read_again_equal(write, monkeypatch):
    header = read_header(write())
    built = gguf_tokenizer.read_tokenizer(header)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_tokenizer, "_built", None)  # it would fail
        kept = gguf_tokenizer.read_tokenizer(header)
    assert kept.backend_tokenizer.to_str() == built.backend_tokenizer.to_str()
    assert kept.init_kwargs == built.init_kwargs
    assert kept("the")["input_ids"] == built("the")["input_ids"]
    place = gguf_tokenizer._place(header)
    place.write_bytes(place.read_bytes()[:-1])  # damaged: built again
    assert gguf_tokenizer.read_tokenizer(header).backend_tokenizer.to_str() == built.backend_tokenizer.to_str()
    assert gguf_tokenizer._place(read_header(write(add_bos_token=True))) != place
