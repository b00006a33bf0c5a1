"""Files are those that compressed-tensors writes for the same weights; they are written whole or not at all."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    OPTConfig,
)

from tests.interchange.conftest import DATA
from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.formats.sparse_bitmask import SparseBitmask
from toolkit.interchange import checkpoint_files, load_dense_model, open_checkpoint, save_checkpoint, save_model

CONFIG = {"model_type": "llama"}


def stored(folder):
    """Every stored tensor as type, shape and bytes."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = [item for file in files for item in load_file(file).items()]
    found = {name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist()) for name, t in tensors}
    assert len(found) == len(tensors)
    return found


def tiny(tied=False, dtype=torch.float32, **config):
    torch.manual_seed(1)
    sizes = {"hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 2, "vocab_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied, dtype=dtype, **config)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                parameter[torch.rand(parameter.shape) < 0.5] = 0
    return model.eval()


def test_the_judge_s_model_comes_out_as_the_judge_wrote_it(tmp_path):
    config = LlamaConfig.from_pretrained(DATA / "llama")
    del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(load_file(DATA / "llama.dense.safetensors"))
    save_model(model, tmp_path / "ours")
    assert stored(tmp_path / "ours") == stored(DATA / "llama")
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "ours", DATA / "llama"))
    sparsity = [entry["quantization_config"]["sparsity_config"] for entry in (ours, theirs)]
    assert 0 < sparsity[0].pop("global_sparsity") < 0.6
    assert sparsity[0] == {key: value for key, value in sparsity[1].items() if key in sparsity[0]}
    assert ours["quantization_config"]["version"] == theirs["quantization_config"]["version"]
    assert ours["quantization_config"]["quant_method"] == theirs["quantization_config"]["quant_method"]
    for key in theirs.keys() - {"quantization_config", "transformers_version"}:
        assert ours[key] == theirs[key], key


def test_vectors_and_every_type_come_out_as_the_judge_wrote_them(tmp_path):
    dense = load_file(DATA / "types.dense.safetensors")
    packed = {name: SparseBitmask.encode(weight) for name, weight in dense.items() if name.endswith(".weight")}
    save_checkpoint(tmp_path / "ours", (dense | packed).items(), CONFIG)
    assert stored(tmp_path / "ours") == stored(DATA / "types")


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(("tied", "shard_bytes"), [(False, 1), (True, 4000)])
def test_a_model_there_and_back(tmp_path, tied, shard_bytes):
    model = tiny(tied)
    save_model(model, tmp_path / "model", Tokenizer(), shard_bytes=shard_bytes)
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
    again = load_dense_model(tmp_path / "model")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert again.generation_config.to_dict() == model.generation_config.to_dict()
    checkpoint = open_checkpoint(tmp_path / "model")
    assert len(checkpoint.packed_names) == 6
    assert ("lm_head.weight" in checkpoint.names) is not tied
    ignored = checkpoint.config["quantization_config"]["sparsity_config"]["ignore"]
    assert sorted(ignored) == sorted(
        ["lm_head", *(f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qkvo")]
    )


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 24}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES = {
    "opt": OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, intermediate_size=48, num_local_experts=4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_biases_positions_and_fused_experts(tmp_path, family):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    with torch.no_grad():
        for module in model.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight[torch.rand(module.weight.shape) < 0.6] = 0
    save_model(model, tmp_path / "model", shard_bytes=10**4)
    again = load_dense_model(tmp_path / "model")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert len(open_checkpoint(tmp_path / "model").packed_names) >= 2 * 4


def test_shards_and_their_index(tmp_path):
    model = tiny()
    save_model(model, tmp_path / "model", shard_bytes=4000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "model").glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    nbytes = 0
    for file in files:
        tensors = load_file(tmp_path / "model" / file)
        held = sum(tensor.nbytes for tensor in tensors.values())
        assert held <= 4000
        assert {name for name, place in index["weight_map"].items() if place == file} == tensors.keys()
        nbytes += held
    assert index["metadata"]["total_size"] == nbytes
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()} == {
        (tmp_path / "model" / "config.json").stat().st_mode & 0o777
    }


def test_global_sparsity_by_hand(tmp_path):
    weights = [("a.weight", encode("endor", torch.eye(4))), ("b.weight", torch.ones(8))]
    save_checkpoint(tmp_path / "model", weights, CONFIG, linears=["a", "c"])
    sparsity = open_checkpoint(tmp_path / "model").config["quantization_config"]["sparsity_config"]
    assert (sparsity["global_sparsity"], sparsity["ignore"]) == (0.5, ["c"])


def test_rotary_settings_where_transformers_4_looks(tmp_path):
    plain = {"rope_theta": 12345.0, "rope_type": "default"}
    scaled = {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}
    for name, rope, scaling in [("a", plain, None), ("b", scaled, {"rope_type": "linear", "factor": 4.0})]:
        save_model(tiny(rope_parameters=rope), tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["rope_theta"], config["rope_scaling"]) == (rope["rope_theta"], scaling)
        assert load_dense_model(tmp_path / name).config.rope_parameters == rope


def test_tensors_that_share_memory(tmp_path):
    both = torch.arange(12.0).view(2, 6)
    save_checkpoint(tmp_path / "model", [("a.bias", both[0]), ("b.bias", both[1]), ("c.weight", both.T)], CONFIG)
    found = dict(open_checkpoint(tmp_path / "model").tensors())
    assert (found["a.bias"].tolist(), found["b.bias"].tolist()) == (both[0].tolist(), both[1].tolist())
    assert torch.equal(found["c.weight"], both.T)


MATRIX = torch.eye(4)
PACKED = SparseBitmask.encode(MATRIX)


def test_bad_names_and_a_source_that_breaks_off_leave_nothing_behind(tmp_path):
    def broken(error):
        yield "a.weight", MATRIX
        yield "b.weight", MATRIX
        raise error

    for weights, error, told in (
        ([("a.weight", MATRIX), ("a.weight", MATRIX)], UserError, "two tensors are named 'a.weight'"),
        ([("a.weight", MATRIX), ("a.shape", MATRIX)], UserError, "'a.shape' would be taken for a part"),
        ([("a.kernel", PACKED)], UserError, "'a.kernel' packed; expected a name that ends in .weight"),
        (broken(KeyboardInterrupt()), KeyboardInterrupt, ""),
        (broken(RuntimeError("no more")), RuntimeError, "no more"),
    ):
        with pytest.raises(error, match=told):
            save_checkpoint(tmp_path / "model", weights, CONFIG, shard_bytes=1)
        assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_written(tmp_path):
    with torch.device("meta"):
        away = LlamaForCausalLM(tiny().config)
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is a meta tensor"):
        save_model(away, tmp_path / "model")
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight: .*float64"):
        save_model(tiny().double(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_one_shard_in_memory(tmp_path, monkeypatch):
    held = []
    flush = checkpoint_files.Shards._flush

    def watched(self):
        held.append(sum(tensor.nbytes for tensor in self.held.values()))
        flush(self)

    monkeypatch.setattr(checkpoint_files.Shards, "_flush", watched)
    save_checkpoint(tmp_path / "model", ((f"{i}.weight", torch.ones(100)) for i in range(10)), CONFIG, shard_bytes=1000)
    assert held == [800] * 5
