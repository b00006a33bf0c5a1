import json
from itertools import cycle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.families import write_family
from tests.refusals import refused
from toolkit import downloads, hub, models
from toolkit.errors import UserError
from toolkit.models import MODELS, check_model, decoder_blocks, decoder_linears, load_model
from toolkit.models.blocks import cast_parameters
from toolkit.models.plain import as_stored

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2}
ON_REQUEST = [name for name, model in MODELS.items() if downloads.DOWNLOADS[model.gguf].notice]
PLAIN = [name for name in MODELS if name not in (*ON_REQUEST, "smollm2-135m-moe-upcycled")]
DTYPES = (torch.bfloat16, torch.float32)  # in turns
FAMILIES = dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3"), LLAMA)
FAMILIES |= {name: LLAMA | {"head_dim": 8} for name in ("Gemma", "Gemma2", "Gemma3Text")}
FAMILIES |= {"OPT": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}, "Falcon": SMALL}


def small(family, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("name", "dtype"), [*zip(PLAIN, cycle(DTYPES), strict=False)])
def test_embedded_models_hold_plain_weights(name, dtype):
    model, tokenizer = load_model(name, dtype=dtype)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {angles.dtype for _, angles in model.named_buffers()} == {torch.float32}  # of rotary embeddings: not rounded
    for block in decoder_blocks(model):
        for linear in decoder_linears(block).values():
            assert type(linear) is nn.Linear
            assert type(linear.weight) is nn.Parameter
    text = "Two  spaces, it's 1995: naïve café.\n\nA new paragraph."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("family", "dtype"), [("Inkling 2", "bfloat16"), ("Ernie 4.5 MoE", "bfloat16"), ("GptOss", "float16")]
)
def test_types_are_those_of_transformers(tmp_path, family, dtype):
    """Also if a model in float32 is rounded later, as after pruning."""
    write_family(family, tmp_path, torch.float32)
    dtype = getattr(torch, dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, **hub.NO_CODE)
    assert {parameter.dtype for parameter in theirs.parameters()} == {dtype, torch.float32}
    later = load_model(str(tmp_path), torch.float32)[0]
    cast_parameters(later, dtype)
    for model in (later, load_model(str(tmp_path), dtype)[0]):
        stored = dict(as_stored(model))
        for name, parameter in theirs.named_parameters():
            assert stored[name].dtype == parameter.dtype, name
            assert torch.equal(stored[name], parameter), name


def test_dequantised_values_are_those_of_the_file():
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(downloads.fetch("smollm2-135m")).tensors}
    model, _ = load_model("smollm2-135m", torch.float32)
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
    }.items():
        expected = torch.from_numpy(dequantize(tensors[theirs].data, tensors[theirs].tensor_type))
        assert torch.equal(model.get_parameter(ours), expected)
    # a Q4_1 block of 32 weights has at most 16 values
    block = model.get_parameter("model.layers.7.mlp.down_proj.weight")[0, :32]
    assert len(block.unique()) <= 16
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("call", [load_model, check_model])
def test_code_in_a_models_folder_is_never_run(tmp_path, monkeypatch, call):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever asks gets a yes
    ran = tmp_path / "ran"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "custom.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nclass Config: pass\nModel = Config\n"
    )
    auto_map = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "custom", "auto_map": auto_map}))
    (tmp_path / "model" / "model.safetensors").touch()
    with refused("code of its own"):
        call(str(tmp_path / "model"))
    assert not ran.exists()


def test_pickled_weights_are_never_read(tmp_path):
    origin = small("Llama", **LLAMA)
    origin.config.save_pretrained(tmp_path)
    torch.save(origin.state_dict(), tmp_path / "pytorch_model.bin")
    for call in (load_model, check_model):
        with refused("pickled weights are not read"):
            call(str(tmp_path))


@pytest.mark.parametrize("call", [load_model, check_model])
def test_a_tokenizer_of_sentencepiece_alone_names_its_packages(tmp_path, monkeypatch, call):
    """The first byte of its file is that of a protocol buffer. Neither package is one of the toolkit's."""
    monkeypatch.setattr("toolkit.models.loading.find_spec", lambda name: None)
    small("Llama", **FAMILIES["Llama"]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    with pytest.raises(UserError, match=r"tokenizer\.model; `pip install sentencepiece protobuf`, or [^\n]* it$"):
        call(str(tmp_path))


def test_tensors_that_do_not_fit_the_config_are_named(tmp_path):
    write_family("Qwen2", tmp_path, torch.float32)
    whole, weights = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    up, head = "model.layers.1.mlp.up_proj.weight", "lm_head.weight"
    for tensors, told in (
        ({name: whole[name] for name in whole.keys() - {up, head}}, "lack lm_head.weight and 1 other"),
        (whole | {"extra": torch.ones(1)}, "no place for extra;"),
        (whole | {up: torch.ones(2, 2)}, "its tensors have other shapes than its config says"),
    ):
        save_file(tensors, weights, {"format": "pt"})
        with refused(told):
            load_model(str(tmp_path))
    weights.write_bytes(weights.read_bytes()[:100])
    with refused("cannot load model"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("call", [load_model, check_model])
@pytest.mark.parametrize("file", ["../other/model.safetensors", 7])
def test_an_index_names_files_of_its_folder_alone(tmp_path, call, file):
    for place in ("model", "other"):
        write_family("Qwen2", tmp_path / place, torch.float32)
    name = "model.norm.weight"
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(tmp_path / "model" / "model.safetensors"), file)}
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "model-1.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"index.json: names {file} for '{name}|expected the name of a file beside it"):
        call(str(tmp_path / "model"))


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path):
    """transformers makes one without words of the settings alone."""
    write_family("Qwen2", tmp_path, torch.float32)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"it holds no tokenizer that transformers can read, such as a tokenizer.json$"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("family", "words"), {"BERT": "depend on later tokens", "BART": "encoder-decoder"}.items())
def test_what_reads_later_tokens_is_refused(tmp_path, family, words):
    write_family(family, tmp_path, torch.float32)
    with pytest.raises(UserError, match=words):
        load_model(str(tmp_path))


def test_an_unknown_model_without_a_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    for name in ("smollm3", "nobody/nothing", "./no/such/folder"):
        with pytest.raises(UserError, match=rf"{name}[^\n]*available offline: [^\n]*smollm2-135m[^\n]*$"):
            load_model(name)
    with pytest.raises(UserError, match="cannot load model"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("bfloat16", "expected"), [(0.5, torch.bfloat16), (0.9, torch.float32)])
def test_fast_dtype_is_bfloat16_only_where_it_clearly_pays_and_stays(monkeypatch, tmp_path, bfloat16, expected):
    """A later choice in a busy moment changes nothing."""
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for seconds in (bfloat16, 1.4 - bfloat16):
        timed = {"bfloat16": seconds, "float32": 1.0}
        monkeypatch.setattr("toolkit.kernels.engine.tuning.measure", lambda _, timed=timed: timed)
        assert models.fast_dtype.__wrapped__() == expected


@pytest.mark.slow
def test_gemma_as_its_file_has_it(tmp_path):
    """Downloads 253 MB. Its perplexity is what Gemma 3 270M should have, and our step gives transformers' logits."""
    from gguf import GGUFReader, dequantize
    from transformers.cache_utils import DynamicCache

    from toolkit.offload.model import OffloadedModel
    from toolkit.quality import load_tokens, perplexity
    from toolkit.storage.packing import Linears, pack_model

    model, tokenizer = load_model("gemma3-270m", torch.float32)
    tensors = {tensor.name: tensor for tensor in GGUFReader(downloads.fetch("gemma3-270m")).tensors}
    stored = tensors["blk.7.ffn_down.weight"]
    expected = torch.from_numpy(dequantize(stored.data, stored.tensor_type))
    assert torch.equal(model.get_parameter("model.layers.7.mlp.down_proj.weight"), expected)
    tokens = load_tokens("wiki-slice", tokenizer, "evaluation")
    assert 19 < perplexity(model, tokens, 512, 4) < 22
    pack_model(model, tmp_path / "store", Linears(("endor",)), "gemma3-270m", tokenizer)
    with OffloadedModel.open(tmp_path / "store", "endor_packed") as ours, torch.no_grad():
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        for piece in (tokens[None, :600], *tokens[None, 600:608].split(1, dim=1)):  # more than the window of 512
            found, wanted = (
                each(input_ids=piece, past_key_values=cache, logits_to_keep=1).logits
                for each, cache in zip((ours.model, model), caches, strict=True)
            )
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2)
