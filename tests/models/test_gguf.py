"""GGUF files as models: every weight, heads that lie apart, and files that lack something or ask for too much."""

import gguf
import numpy as np
import pytest
import torch
import transformers

from tests.refusals import refused
from toolkit.models import gguf_tokenizer, load_model
from toolkit.models.gguf_header import read_header

HIDDEN, FFN, LAYERS, HEADS = 256, 512, 2, 4
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WORDS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "Ġt", "he"]
COUNT = len(WORDS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(file, architecture="qwen2", kind="F32", head=True, words=COUNT, without=(), more=None, **metadata):
    """A random decoder; returns the dequantised weights by their names in transformers."""
    numbers = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, architecture)
    sizes = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
    }
    for key, value in (sizes | metadata).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32 if value >= 0 else writer.add_int32
        add(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS + [f"word{number}" for number in range(COUNT, words)])
    writer.add_token_types([3, 3, 3] + [1] * (words - 3))
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (words, HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {"output": (words, HIDDEN)} if head else {}
    matrices = {name: (HIDDEN, HIDDEN) for name in NAMES if name.startswith("attn_")}
    matrices |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
    matrices |= {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
    if architecture == "qwen2":
        matrices |= {f"attn_{name}.bias": (HIDDEN,) for name in "qkv"}
    shapes |= {f"blk.{block}.{name}": shape for block in range(LAYERS) for name, shape in matrices.items()}
    weights = {}
    for name, given in (shapes | (more or {})).items():
        full = name if name.endswith(".bias") else f"{name}.weight"
        shape = np.shape(given) if isinstance(given, np.ndarray) else given
        values = numbers.standard_normal(shape, dtype=np.float32) * 0.1 + (len(shape) == 1)
        values = given if isinstance(given, np.ndarray) else values
        raw = None
        if len(shape) > 1 and kind != "F32":
            raw = gguf.GGMLQuantizationType[kind]
            blocks = gguf.quants.quantize(values, raw)
            values, dense = blocks, gguf.quants.dequantize(blocks, raw)
        else:
            dense = values
        if full not in without:
            writer.add_tensor(full, values, raw_dtype=raw)
        weights[_name(full)] = torch.from_numpy(np.array(dense, np.float32))
    finish(writer)
    return weights


def _name(name):
    for short, full in {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}.items():
        if name.startswith(f"{short}."):
            return name.replace(short, full)
    if name.startswith("output."):
        return name.replace("output", "lm_head")
    if not name.startswith("blk."):
        return name
    _, block, short, kind = name.split(".")
    return f"model.layers.{block}.{NAMES[short]}.{kind}"


@torch.no_grad()
def reference(weights, tokens):
    """The logits of transformers' model of these weights, built from a config that is written here by hand."""
    sizes = {"vocab_size": len(WORDS), "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS}
    config = transformers.Qwen2Config(
        **sizes, num_attention_heads=HEADS, num_key_value_heads=HEADS, rms_norm_eps=1e-6, tie_word_embeddings=False
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.load_state_dict(
        weights | {"lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"])}
    )
    return model(tokens).logits


@pytest.mark.parametrize(("kind", "head"), [("F32", True), ("Q4_0", True), ("Q8_0", False), ("BF16", False)])
def test_logits_are_those_of_the_stored_weights_and_head(tmp_path, kind, head):
    """A Qwen2 of this size ties head and embedding by default; the file decides."""
    weights = write(tmp_path / "tiny.gguf", kind=kind, head=head)
    model, tokenizer = load_model(str(tmp_path / "tiny.gguf"), torch.float32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) != head
    tokens = torch.tensor([[5, 9, 60, 97]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, reference(weights, tokens), rtol=1e-5, atol=1e-4)
    assert tokenizer.decode(tokenizer("the")["input_ids"]) == "the"
    rounded, _ = load_model(str(tmp_path / "tiny.gguf"), torch.bfloat16)
    for name, weight in rounded.named_parameters():
        assert torch.equal(weight, weights[name].bfloat16()), name


def test_a_file_is_dequantised_once_whatever_its_name(tmp_path, monkeypatch):
    write(tmp_path / "tiny.gguf", "llama")
    load_model(str(tmp_path / "tiny.gguf"))
    (tmp_path / "tiny.gguf").rename(tmp_path / "other")
    monkeypatch.setattr("toolkit.models.gguf.read", lambda *_: pytest.fail("dequantised again"))
    load_model(str(tmp_path / "other"))


def test_rotary_factors_are_those_of_llama_3(tmp_path):
    """By hand: a frequency is divided by 8 below one turn in 8192 positions, by 1 above four, and between on a line."""
    turns = 8192 * 10000.0 ** -(np.arange(32) / 32) / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = 1 / ((1 - smooth) / 8 + smooth)
    write(tmp_path / "tiny.gguf", "llama", more={"rope_freqs": factors.astype(np.float32)})
    model, _ = load_model(str(tmp_path / "tiny.gguf"))
    expected = 10000.0 ** -(np.arange(32) / 32) / factors
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), expected, rtol=1e-5)


FAULTY = {
    "a tensor less": ({"without": ["blk.1.ffn_up.weight"]}, r"lacks 1 of the model's tensors, such as .*1.mlp.up_proj"),
    "a tensor more": ({"more": {"dense_2": (32,)}}, r"no place for its tensor 'dense_2.weight'$"),
    "a block more": ({"more": {"blk.2.attn_norm": (HIDDEN,)}}, r"block_count is 2; expected 3, the blocks that"),
    "another shape": ({"feed_forward_length": FFN - 2}, r"'blk.0.ffn_gate.weight' is 512 × 256, .* 510 × 256 there$"),
    "one kind of factors": ({"more": {"rope_factors_long": (32,)}}, "both .* or neither"),
    "factors of another size": ({"more": {"rope_freqs": (16,)}}, r"rope_freqs.weight has shape \(16,\); expected"),
    "architecture": ({"architecture": "deepseek2"}, "reads no GGUF file of architecture 'deepseek2'"),
    "key": ({"attention.max_alibi_bias": 8}, r"its qwen2.attention.max_alibi_bias is 8; expected none: .*cannot apply"),
    "scaling": ({"rope.scaling.type": "dynamic"}, "rope.scaling.type is 'dynamic'; expected none, linear, yarn, or"),
    "rotated part": ({"rope.dimension_count": 32}, "rope.dimension_count is 32; expected 64, the size of a head"),
    "blocks": ({"block_count": 2**30}, r"block_count is 1073741824; expected a whole number from 0 to 512"),
    "negative": ({"expert_used_count": -5}, "expert_used_count is -5"),
    "text": ({"expert_used_count": "abc"}, "expert_used_count is 'abc'"),
    "no embedding": ({"without": ["token_embd.weight"]}, "lacks the token embedding"),
}


def test_a_faulty_file_is_one_line(tmp_path):
    for changes, words in FAULTY.values():
        write(tmp_path / "tiny.gguf", **changes)
        with refused(words) as caught:
            load_model(str(tmp_path / "tiny.gguf"))
        assert "hub" not in str(caught.value)


def test_the_tokenizer_of_a_file_is_built_once_and_read_again_equal(tmp_path, monkeypatch):
    write(tmp_path / "tiny.gguf")
    header = read_header(tmp_path / "tiny.gguf")
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
    write(tmp_path / "tiny.gguf", add_bos_token=True)
    assert gguf_tokenizer._place(read_header(tmp_path / "tiny.gguf")) != place
