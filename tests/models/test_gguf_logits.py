"""A GGUF file's keys are applied or refused; `tests/offload/test_gguf_readers.py` compares the logits."""

import re
from dataclasses import replace

import gguf
import pytest
import torch
import transformers
from gguf_files import CASES, HEADS, HIDDEN, WORDS, write

from toolkit.errors import UserError
from toolkit.models import load_model
from toolkit.models.gguf import BY_TRANSFORMERS, architectures, check, read
from toolkit.models.gguf_config import FAMILIES, config_of
from toolkit.models.gguf_header import read_header
from toolkit.models.gguf_second_reading import compare
from toolkit.models.gguf_tensors import ARCHITECTURES

TOKENS = (torch.arange(40) * 37 % WORDS)[None]  # longer than the windows, and than the lengths that factors are for
LARGE = [name for name in CASES if "blocks" in name]  # as many as Gemma's 27 B has
EXACT = 1e-4  # of the logits' standard deviation


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))


@torch.no_grad()
def difference(model, original):
    """The largest one of the logits, in standard deviations."""
    expected = original(TOKENS).logits
    return float((model(TOKENS).logits - expected).abs().max() / expected.std())


def header_of(name, folder):
    """The header of a case's file."""
    write(CASES[name].model(), CASES[name], folder / "model.gguf")
    return read_header(folder / "model.gguf")


def opened(file):
    """The model of a file, without the copy that `load_model` keeps."""
    found, _ = read(read_header(file), torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(found.config, dtype=torch.float32).eval()
    model.load_state_dict(found.state_dict())
    return model


@pytest.mark.parametrize("name", ["gemma3, global × 8", "gpt-oss"])
def test_the_kept_copy_has_the_same_logits(tmp_path, name):
    """Split into pieces, of which the last one is named; the configuration is written and read again."""
    original = CASES[name].model()
    write(original, CASES[name], tmp_path / "model.gguf", pieces=10)
    last = sorted(tmp_path.glob("*.gguf"))[-1]
    model, tokenizer = load_model(str(last), torch.float32)
    assert difference(model, original) < EXACT
    assert tokenizer.decode(tokenizer("the he")["input_ids"]) == "the he"


@pytest.mark.parametrize(("name", "kind"), [("llama", "F16"), ("mixtral", "Q8_0"), ("qwen3moe", "Q8_0")])
def test_a_matrix_is_dequantised(tmp_path, name, kind):
    """Rows are whole blocks, so the order of rows does not change what a block holds."""
    original, raw = CASES[name].model(), gguf.GGMLQuantizationType[kind]
    write(original, CASES[name], tmp_path / "model.gguf", kind)
    with torch.no_grad():
        for parameter_name, parameter in original.named_parameters():
            if parameter.ndim > 1 and "gate.weight" not in parameter_name:
                blocks = gguf.quants.quantize(parameter.numpy(), raw)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, raw)))
    assert difference(opened(tmp_path / "model.gguf"), original) < EXACT


@pytest.mark.parametrize("name", LARGE)
def test_queries_of_gemma_27b_are_scaled_by_hidden_size_over_heads(tmp_path, name):
    case = CASES[name]
    fewer = replace(case, fields=dict(case.fields) | {"num_hidden_layers": 2})
    write(fewer.model(), fewer, tmp_path / "model.gguf")
    header = read_header(tmp_path / "model.gguf")
    assert config_of(header).query_pre_attn_scalar == case.fields["head_dim"]
    count = case.fields["num_hidden_layers"]
    tensors = {f"blk.{number}.attn_norm.weight": header.tensors["output_norm.weight"] for number in range(count)}
    more = {f"{case.architecture}.block_count": count}
    large = replace(header, metadata=header.metadata | more, tensors=header.tensors | tensors)
    assert config_of(large).query_pre_attn_scalar == HIDDEN // HEADS


def test_every_architecture_has_names_keys_and_a_case():
    assert FAMILIES.keys() == ARCHITECTURES.keys() == {case.architecture for case in CASES.values()}
    assert set(architectures()) == FAMILIES.keys() | set(BY_TRANSFORMERS)


OTHERS = {  # the other reader takes the same weights, and leaves out what these words name
    "llama, yarn": r"; it ignores rope\.scaling\.type, rope\.scaling\.factor, applied here",
    "llama, llama 3": r"; it ignores rope_freqs\.weight, applied here",
    "qwen3moe": "",
}


@pytest.mark.parametrize(("name", "words"), OTHERS.items())
def test_another_reader_finds_the_same_weights(tmp_path, name, words):
    expected = f"weights of the file as transformers' own loader reads them{words}"
    assert re.fullmatch(expected, compare(header_of(name, tmp_path)))


def test_other_weights_and_values_of_another_reader_are_named(tmp_path, monkeypatch):
    """Names change places in our tables, and a norm's constant is another one."""
    write(CASES["llama"].model(), CASES["llama"], tmp_path / "model.gguf")
    swapped = ARCHITECTURES["llama"].block | {"ffn_gate": "mlp.up_proj", "ffn_up": "mlp.gate_proj"}
    monkeypatch.setitem(ARCHITECTURES, "llama", replace(ARCHITECTURES["llama"], block=swapped))
    header = read_header(tmp_path / "model.gguf")
    key = "llama.attention.layer_norm_rms_epsilon"
    words = compare(replace(header, metadata=header.metadata | {key: 0.5}))
    assert words.startswith("transformers' own loader reads the file otherwise (rms_norm_eps 0.5, there ")
    assert "model.layers.0.mlp.gate_proj.weight has other values" in words


UNCHANGED = {  # keys that do not change what any model computes, or nothing without another key
    "vocab_size",
    "tensor_data_layout",
    "feed_forward_length",  # of a mixture, whose tensors have it
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}


def keys():
    """All keys of an architecture that the package `gguf` knows."""
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    inner = [group for outer in groups for group in vars(outer).values() if isinstance(group, type)]
    values = [value for group in groups + inner for name, value in vars(group).items() if not name.startswith("_")]
    return sorted({value.removeprefix("{arch}.") for value in values if str(value).startswith("{arch}.")})


def outcome(header):
    """The configuration as a dictionary, or the words of the refusal."""
    try:
        return config_of(header).to_dict()
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", ["qwen3moe", "gemma3", "phi3, long"])
def test_no_key_is_ignored(tmp_path, name):
    """A strange value of any key changes the configuration, or is refused by the key's name."""
    header = header_of(name, tmp_path)
    usual, ignored = outcome(header), set()
    for key in keys():
        full = f"{header.architecture}.{key}"
        strange = replace(header, metadata=header.metadata | {full: 7 if key != "attention.causal" else False})
        result = outcome(strange)
        if result == usual:
            ignored.add(key)
        assert not isinstance(result, str) or full in result or "describes no model" in result
    assert len(keys()) > 100
    assert ignored <= UNCHANGED, ignored - UNCHANGED


def test_a_scaling_without_a_type_is_linear(tmp_path):
    """As in llama.cpp, also under the name that the factor had first."""
    header = header_of("llama", tmp_path)
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        rope = config_of(replace(header, metadata=header.metadata | {f"llama.{key}": 4.0})).rope_parameters
        assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)


STRANGE = (-1, 0, 0.5, float("nan"), "abc", True, [1, 2, 3])


@pytest.mark.parametrize("name", ["mixtral", "gemma3"])
def test_strange_values_never_break_the_reader(tmp_path, name):
    """Any value of any key makes a configuration or is refused as bad input."""
    header = header_of(name, tmp_path)
    refused = 0
    for key in [key for key in header.metadata if key.startswith(f"{header.architecture}.")]:
        for value in STRANGE:
            refused += isinstance(outcome(replace(header, metadata=header.metadata | {key: value})), str)
    assert refused > 40


def test_a_key_that_transformers_leaves_out_refuses_what_only_it_reads(tmp_path):
    header = header_of("llama", tmp_path)
    keys = {
        "general.architecture": "falcon",
        "tokenizer.ggml.model": "gpt2",
        "falcon.attention.layer_norm_epsilon": 1e-5,
    }
    check(replace(header, metadata=keys))
    with pytest.raises(
        UserError, match=r"its falcon\.rope\.scaling\.type is 'yarn', which transformers' loader leaves"
    ):
        check(replace(header, metadata=keys | {"falcon.rope.scaling.type": "yarn"}))
